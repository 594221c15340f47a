"""The project's files agree with one another."""

import os
import re
import shutil
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

TEST_COMMAND = 'pip install -e ".[test]" && pytest'
SOURCES = {".py", ".yaml", ".yml", ".toml", ".md", ".ipynb", ".json", ".jsonl", ".cfg", ".txt", ".sh", ""}
SKIPPED = {".git", ".venv", "venv", "build", "dist", "runs", "outputs", "lightning_logs", "__pycache__"}


@pytest.fixture(scope="module")
def project(repository):
    return tomllib.loads((repository / "pyproject.toml").read_text())


def own_files(root: Path) -> list[Path]:
    """Every text file that belongs to the repository: git's list, or the tree where there is no git."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True)
    if listed.returncode == 0:
        files = [root / name for name in listed.stdout.split("\0") if name]
    else:
        files = [file for file in root.rglob("*") if not SKIPPED & set(file.relative_to(root).parts)]
    return [file for file in files if file.is_file() and file.suffix in SOURCES]


def fenced_lines(markdown: str) -> list[str]:
    blocks = re.findall(r"^ *```[^\n]*\n(.*?)^ *```", markdown, flags=re.DOTALL | re.MULTILINE)
    return [line.strip().removeprefix("$ ") for block in blocks for line in block.splitlines()]


def test_every_top_level_package_is_named(repository, project):
    packages = {file.parent.name for file in repository.glob("*/__init__.py")}
    named = {pattern.removesuffix("*") for pattern in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    assert packages == named
    modules = {file.stem for file in repository.glob("*.py")}
    assert modules == set(project["tool"]["setuptools"]["py-modules"])


def test_every_folder_of_a_package_is_a_package(repository):
    for package in repository.glob("*/__init__.py"):
        for file in package.parent.rglob("*.py"):
            assert (file.parent / "__init__.py").is_file(), f"{file.parent} would be left out of an installation"


def test_package_data_matches_what_the_packages_hold(repository, project):
    patterns = project["tool"]["setuptools"]["package-data"]["*"]
    held = {f.suffix for f in own_data(repository)}
    assert held <= {Path(pattern).suffix for pattern in patterns}


def own_data(root: Path) -> list[Path]:
    folders = [file.parent for file in root.glob("*/__init__.py")]
    files = [f for folder in folders for f in folder.rglob("*") if f.is_file() and "__pycache__" not in f.parts]
    return [file for file in files if file.suffix not in {".py", ".pyc", ".md"}]


def test_extras_hold_what_the_tests_and_tools_need(project):
    extras = project["project"]["optional-dependencies"]
    assert {"pytest", "pytest-timeout", "nbclient", "nbformat", "ipykernel"} <= set(extras["test"])
    assert {"ruff", "pyright", "leangrpo[test]"} <= set(extras["dev"])
    assert "lightning>=2.6.4" in project["project"]["dependencies"]


@pytest.mark.parametrize("name", ["README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", ".gitignore", ".ci/run"])
def test_the_project_files_exist(repository, name):
    assert (repository / name).read_text().strip()


def test_the_licence_is_apache_2(repository, project):
    text = (repository / "LICENSE").read_text()
    assert "Apache License" in text and "Version 2.0, January 2004" in text and "END OF TERMS AND CONDITIONS" in text
    assert project["project"]["license"] == "Apache-2.0"


def test_the_changelog_starts_with_this_version(repository, project):
    headings = re.findall(r"^## \[?([^\]\s]+)", (repository / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert next(heading for heading in headings if heading != "Unreleased") == project["project"]["version"]


def test_no_source_names_a_folder_of_one_machine(repository):
    pattern = re.compile(r"(?<![\w.:/~}])/(?:home|work|root|Users|scratch|mnt)/[\w.]")
    found = [
        f"{file.relative_to(repository)}: {match.group()}"
        for file in own_files(repository)
        if file != Path(__file__).resolve()
        for match in pattern.finditer(file.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_ci_runs_the_readme_command(repository):
    (command,) = [
        line for line in fenced_lines((repository / "README.md").read_text()) if line.startswith(TEST_COMMAND)
    ]
    shown = subprocess.run([repository / ".ci/run", "--show"], capture_output=True, text=True, check=True)
    assert shown.stdout == command + "\n"
    subprocess.run(["bash", "-n", "-c", command], check=True)


@pytest.mark.parametrize(
    ("readme", "shown"),
    [
        ('text\n```bash\n$ pip install -e ".[test]" && pytest -q  \n```\n', f"{TEST_COMMAND} -q\n"),
        ('1. so:\n   ```\n   pip install -e ".[test]" && pytest\n   ```\n', f"{TEST_COMMAND}\n"),
        (f"{TEST_COMMAND}\n```\nsomething else\n```\n{TEST_COMMAND}\n", None),
        (f"```\n{TEST_COMMAND}\n{TEST_COMMAND} -q\n```\n", None),
        ("no command\n", None),
    ],
)
def test_ci_finds_the_command_or_fails(repository, tmp_path, readme, shown):
    (tmp_path / ".ci").mkdir()
    script = shutil.copy(repository / ".ci/run", tmp_path / ".ci/run")
    (tmp_path / "README.md").write_text(readme)
    run = subprocess.run([script, "--show"], capture_output=True, text=True)
    if shown is None:
        assert run.returncode != 0
        assert "exactly one fenced line" in run.stderr
    else:
        assert (run.returncode, run.stdout) == (0, shown)


def test_ci_runs_in_a_fresh_environment_passes_the_status_on_and_cleans_up(repository, tmp_path):
    """The same script with a command that installs nothing."""
    (tmp_path / ".ci").mkdir()
    (tmp_path / "temporary").mkdir()
    script = tmp_path / ".ci/run"
    script.write_text((repository / ".ci/run").read_text().replace(f"start='{TEST_COMMAND}'", "start='python -c'"))
    script.chmod(0o755)
    program = "import os, sys; print(sys.prefix, os.getcwd()); sys.exit(3)"
    (tmp_path / "README.md").write_text(f'```\npython -c "{program}"\n```\n')
    surroundings = os.environ | {"TMPDIR": str(tmp_path / "temporary"), "PYTHON": sys.executable}
    run = subprocess.run([script], capture_output=True, text=True, cwd="/", env=surroundings)
    assert run.returncode == 3
    prefix, folder = run.stdout.splitlines()[-1].split()
    assert Path(prefix).is_relative_to(tmp_path / "temporary")
    assert Path(folder) == tmp_path
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.parametrize("call", ["connect", "connect_ex", "getaddrinfo", "create_connection"])
def test_the_network_is_refused(call):
    with socket.socket() as attempt:
        attempts = {
            "connect": lambda: attempt.connect(("192.0.2.1", 443)),
            "connect_ex": lambda: attempt.connect_ex(("192.0.2.1", 443)),
            "getaddrinfo": lambda: socket.getaddrinfo("example.org", 443),
            "create_connection": lambda: socket.create_connection(("example.org", 443), timeout=1),
        }
        with pytest.raises(RuntimeError, match="tests may connect to loopback only"):
            attempts[call]()


def test_a_hub_download_is_refused(tmp_path):
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    with pytest.raises(LocalEntryNotFoundError):
        hf_hub_download("some/model", "config.json", cache_dir=tmp_path)


def test_loopback_and_unix_sockets_stay_open(tmp_path):
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(("localhost", server.getsockname()[1]), timeout=5) as client,
    ):
        assert client.getpeername()[0] == "127.0.0.1"
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind(str(tmp_path / "s"))
        server.listen()
        client.connect(str(tmp_path / "s"))
