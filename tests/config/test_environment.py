"""Folders of sockets: unsafe ones are refused, with the remedy."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from inferengine.cli.check import engine_socket
from inferengine.config import runtime_directory, unsafe_folder, visible_cards
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
    def test_a_folder_that_others_may_write_to_is_refused(self, base: Path, mode: int) -> None:
        (base / "inferengine").mkdir()
        (base / "inferengine").chmod(mode)
        with pytest.raises(ConfigError, match=r"others may write to .*: chmod 0750"):
            runtime_directory()

    def test_a_folder_with_the_sticky_bit_is_accepted(self, tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("named", "cards"),
    [("2,GPU-8a", ["2", "GPU-8a"]), ("0, 1", ["0", "1"]), ("", []), ("-1", []), ("1,-1,0", ["1"])],
)
def test_visible_cards_are_those_that_cuda_would_see(
    named: str, cards: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert visible_cards() == cards
