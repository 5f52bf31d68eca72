"""Run `autoac` in this process, in a folder with a module of the user's."""

import sys

import pytest

from ac_client.cli.main import main


def run(capsys, *argv):
    """Run `autoac ARGV`; return its exit code, stdout and stderr."""
    with pytest.raises(SystemExit) as exited:
        main([str(arg) for arg in argv])
    out, err = capsys.readouterr()
    return exited.value.code, out, err


def module_in(folder, name, text, monkeypatch):
    """Write a module into `folder`, which becomes the current one; the next import reads it."""
    (folder / f"{name}.py").write_text(text)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, name, raising=False)
