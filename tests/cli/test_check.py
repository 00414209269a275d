"""`inferengine check`: which Python the systemd units can run, and what an executor needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from inferengine.cli import check
from inferengine.cli.check import OK, PROBLEM, out_of_reach
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
