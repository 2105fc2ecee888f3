"""The hooks for pre-commit and the workflow of the documentation do what they say.

Their commands run as they are written in the YAML files, on the files of the page.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from command import invoke

import treeadapt as ta

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parent.parent
PAGE = (REPOSITORY / "docs" / "recipes" / "checks.md").read_text("utf-8")
HOOKS = {
    hook["id"]: hook
    for hook in yaml.safe_load((REPOSITORY / ".pre-commit-hooks.yaml").read_text())
}


def shown(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```\n", PAGE, re.DOTALL | re.MULTILINE)


CONFIG, WORKFLOW = map(yaml.safe_load, shown("yaml"))
(USED,) = (repo["hooks"] for repo in CONFIG["repos"])
STEPS = [step for step in WORKFLOW["jobs"]["names"]["steps"] if "run" in step]


@pytest.fixture
def project(tmp_path, monkeypatch):
    """The files of the page, with the schema that its program writes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "model", raising=False)
    for name, language in (("model.py", "python"), ("freeze.toml", "toml")):
        text, *_ = shown(language)  # the others are of other parts of the page
        Path(name).write_text(text)
    write_schema()
    yield
    sys.modules.pop("model", None)


def write_schema():
    (line,) = shown("bash")
    code, output = treeadapt(line.replace(" convert ", " convert --force "))
    assert code == 0, output


def rename_the_head():
    sys.modules.pop("model", None)
    Path("model.py").write_text(Path("model.py").read_text().replace("head", "out"))


def treeadapt(command: str) -> tuple[int, str]:
    name, *arguments = shlex.split(command)
    assert name == "treeadapt"
    done = invoke(*arguments)
    return done.exit_code, done.output


def run(hook: dict[str, object]) -> tuple[int, str]:
    """Run a hook as pre-commit does: its entry, then the arguments of the config."""
    return treeadapt(f"{HOOKS[hook['id']]['entry']} {shlex.join(hook['args'])}")


def test_the_hooks_pass_and_fail(project):
    assert {hook["id"] for hook in USED} == set(HOOKS)
    lint, diff = USED
    assert run(lint) == (0, "0 findings in 9 arrays.\n")
    assert run(diff)[0] == 0
    rename_the_head()
    code, printed = run(diff)
    assert (code, "'head/w' -> 'out/w'" in printed) == (1, True)
    table = Path("freeze.toml").read_text().replace("layer_", "layr_")
    Path("freeze.toml").write_text(table)
    code, printed = run(lint)
    assert (code, "matches no array" in printed) == (1, True)


def test_pre_commit_can_read_the_hooks():
    for hook in HOOKS.values():
        assert {"id", "name", "entry", "language", "files"} <= set(hook)
        assert hook["pass_filenames"] is False
        assert all(re.search(hook["files"], name) for name in ("a.toml", "b/a.json"))
    (repo,) = CONFIG["repos"]
    assert repo["rev"] == f"v{ta.__version__}"


def git(*arguments):
    who = ("-c", "user.name=a", "-c", "user.email=a@example.com")
    subprocess.run(["git", *who, *arguments], check=True, capture_output=True)


def test_the_workflow_reports_what_a_pull_request_renames(project, monkeypatch):
    monkeypatch.setenv("GITHUB_BASE_REF", "main")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "summary.md")
    git("init", "-q")
    git("add", "model.schema.toml")
    git("commit", "-q", "-m", "before")
    git("update-ref", "refs/remotes/origin/main", "HEAD")
    rename_the_head()
    assert outcomes() == [0, 1, 0, 0, 0, 0]  # the schema is out of date
    write_schema()
    Path("report.md").unlink()
    assert outcomes() == [0, 0, 0, 1, 0, 0]
    assert STEPS[4]["continue-on-error"] is True
    (step,) = (step for step in shown("console") if "renamed" in step)
    command, printed = step.removeprefix("$ ").split("\n", 1)
    assert command == STEPS[4]["run"]
    assert treeadapt(command) == (1, printed)
    assert "'body/layer_{0..1}'" in Path("summary.md").read_text()


def outcomes():
    """Exit codes of the steps after the first, which installs this library."""
    install, *steps = (step["run"] for step in STEPS)
    assert install.startswith("pip install -r requirements.txt")
    return [
        treeadapt(step)[0]
        if step.startswith("treeadapt ")
        else subprocess.run(["bash", "-e", "-c", step], check=False).returncode
        for step in steps
    ]


def test_the_page_prints_what_it_says(project):
    first, *_ = shown("console")  # the others need a checkpoint, or a pull request
    for entry in re.split(r"^\$ ", first, flags=re.MULTILINE)[1:]:
        command, printed = entry.split("\n", 1)
        assert treeadapt(command) == (0, printed)
