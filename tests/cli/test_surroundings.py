"""Where sockets are put and which Python the units run: refused or said before it goes wrong."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from inferengine.cli.check import engine_socket, out_of_reach
from inferengine.config import runtime_directory, unsafe_folder
from inferengine.engine.io.endpoint import Endpoint
from inferengine.errors import ConfigError
from tests.engine.builders import make_config


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("RUNTIME_DIRECTORY", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


class TestSocketFolder:
    def test_the_default_is_made_for_its_user_alone(self, base: Path) -> None:
        assert runtime_directory() == base / "inferengine"
        assert (base / "inferengine").stat().st_mode & 0o027 == 0
        assert runtime_directory() == base / "inferengine"

    def test_a_symbolic_link_is_refused(self, base: Path) -> None:
        (base / "elsewhere").mkdir()
        (base / "inferengine").symlink_to(base / "elsewhere")
        with pytest.raises(ConfigError, match=r"wire.socket: .* is a symbolic link: replace it"):
            runtime_directory()

    @pytest.mark.parametrize("mode", [0o777, 0o770, 0o757])
    def test_one_that_others_may_write_to_is_refused(self, base: Path, mode: int) -> None:
        (base / "inferengine").mkdir()
        (base / "inferengine").chmod(mode)
        with pytest.raises(ConfigError, match=r"others may write to .*: chmod 0750"):
            runtime_directory()

    def test_a_sticky_one_is_not(self, tmp_path: Path) -> None:
        """As /tmp: others may add files, and not take ours away."""
        tmp_path.chmod(0o1777)
        assert unsafe_folder(tmp_path) == ""

    @pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
    def test_one_of_another_user_is_refused(self, base: Path) -> None:
        (base / "inferengine").mkdir()
        os.chown(base / "inferengine", 12345, 12345)
        with pytest.raises(ConfigError, match="belongs to another user"):
            runtime_directory()

    def test_what_is_no_folder_is_refused(self, base: Path) -> None:
        (base / "inferengine").write_text("")
        with pytest.raises(ConfigError, match="is no folder"):
            runtime_directory()

    def test_systemds_own_may_be_a_link(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "private").mkdir()
        (tmp_path / "inferengine").symlink_to(tmp_path / "private")
        monkeypatch.setenv("RUNTIME_DIRECTORY", str(tmp_path / "inferengine"))
        assert runtime_directory() == tmp_path / "private"

    def test_the_engine_refuses_a_folder_that_was_named(self, tmp_path: Path) -> None:
        (tmp_path / "real").mkdir()
        (tmp_path / "link").symlink_to(tmp_path / "real")
        with pytest.raises(ConfigError, match="symbolic link"):
            Endpoint(make_config(str(tmp_path / "link")))
        (tmp_path / "real").chmod(0o777)
        with pytest.raises(ConfigError, match="others may write"):
            Endpoint(make_config(str(tmp_path / "real")))

    def test_root_checks_the_folder_of_a_service_that_runs_as_another_user(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """`sudo inferengine check` beside the units: /run/inferengine is the service's, and is to stay."""
        (folder := tmp_path / "run").mkdir(mode=0o750)
        if os.getuid() == 0:
            os.chown(folder, 12345, 12345)
        monkeypatch.setattr(os, "getuid", lambda: 0)
        config = make_config(str(folder))
        assert [finding.grade for finding in engine_socket(config)] == ["ok"]
        folder.chmod(0o777)
        assert [finding.grade for finding in engine_socket(config)] == ["problem"]


class TestInterpreterOfTheUnits:
    @pytest.mark.parametrize("place", ["/root/.pyenv/versions/3.12.1/bin/python3", "/home/me/.local/bin/python3"])
    def test_one_below_root_or_home_is_said_with_the_remedy(self, place: str) -> None:
        assert "203/EXEC" in (complaint := out_of_reach(Path(place)))
        assert "PYTHON=/usr/bin/python3 scripts/install" in complaint

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
