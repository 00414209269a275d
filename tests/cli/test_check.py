"""`inferengine check`: which Python the systemd units can run, and what an executor needs, which engines
answer."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import pytest

from inferengine.cli import check
from inferengine.cli.check import NOTE, OK, PROBLEM, out_of_reach
from inferengine.config import Config


class TestInterpreterOfTheUnits:
    @pytest.mark.parametrize("place", ["/root/.local/share/uv/python/bin/python3", "/home/me/.local/bin/python3"])
    def test_one_below_root_or_home_is_said_with_the_remedy(self, place: str) -> None:
        assert "203/EXEC" in (complaint := out_of_reach(Path(place)))
        assert "inferengine systemd install" in complaint

    def test_a_link_is_followed(self, tmp_path: Path) -> None:
        tmp_path.joinpath("python").symlink_to("/root/.local/share/uv/python")
        assert "/root" in out_of_reach(tmp_path / "python")

    def test_a_folder_on_the_way_that_others_may_not_enter_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "closed").mkdir(mode=0o700)
        python = tmp_path / "closed" / "python"
        python.write_text("")
        python.chmod(0o755)
        assert f"{tmp_path / 'closed'} may not be entered" in out_of_reach(python)

    def test_the_systems_own_is_within_reach(self) -> None:
        assert out_of_reach(Path("/usr/bin/env")) == ""


class TestOnnxRuntime:
    ASKED = Config().with_values(engine={"executor": "onnx"})

    def test_its_versions_are_said_where_it_is_asked_for(self) -> None:
        assert list(check.onnx(Config())) == []
        (finding,) = check.onnx(self.ASKED)
        assert finding.grade == OK
        assert "onnxruntime 1." in finding.text

    def test_a_package_that_is_missing_is_named_with_its_extra(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "onnxruntime" else name)
        (finding,) = check.onnx(self.ASKED)
        assert finding.grade == PROBLEM
        assert "onnxruntime not installed: pip install 'inferengine[onnx]'" in finding.text


class TestEngine:
    def test_where_others_answer_in_the_same_folder_they_are_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """`up --engines 2` serves at engine-0.sock and engine-1.sock; a command looks at engine.sock."""
        monkeypatch.setattr(check, "ENGINE_TIMEOUT_S", 0.1)
        asked = Config().with_values(wire={"socket": f"ipc://{tmp_path}/engine.sock"})
        with contextlib.ExitStack() as stack:
            for number in range(2):
                server = stack.enter_context(socket.socket(socket.AF_UNIX))
                server.bind(f"{tmp_path}/engine-{number}.sock")
                if number == 0:  # nobody listens at the other
                    server.listen()
            (finding,) = check.engine(asked)
        assert finding.grade == NOTE
        assert f"--wire.socket ipc://{tmp_path}/engine-0.sock" in finding.text
        assert "engine-1.sock" not in finding.text

    def test_where_there_is_none_the_command_that_starts_one_is_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(check, "ENGINE_TIMEOUT_S", 0.1)
        (finding,) = check.engine(Config().with_values(wire={"socket": f"ipc://{tmp_path}/engine.sock"}))
        assert "'inferengine up' starts one" in finding.text
