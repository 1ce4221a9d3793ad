"""The documentation runs.

On each page, in a folder of its own: a ``python`` block with a title is written to that file, the other
``python`` blocks are run one after the other as one script, whose comments behind ``print`` are what must come
out, and each ``console`` block is typed in: its lines after ``$`` are run, and the lines below are what must come
out (in any order, as workers race; ``...`` stands for anything). What a page takes for given is in the folder of
its name in ``tests/pages``: files, and a beginning of the script, ``given.py``. A page that another test runs
names it on its first line. Whatever is not run stands on the page ``internals/untested.md``, with the reason.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import click
import pytest

from warm import Warm

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^( *)```(?P<language>[\w+-]*)(?P<info>[^\n]*)\n(?P<body>.*?)^\1```$", re.M | re.S)
ELSEWHERE = re.compile(r"\A<!-- run by: (\S+) -->")
UNTESTED = ROOT / "docs" / "internals" / "untested.md"
DEADLINE_SECONDS = 250


@dataclass(frozen=True)
class Block:
    language: str
    title: str
    body: str
    line: int

    @property
    def name(self) -> str:
        """Its title, or its first line without a comment."""
        return self.title or re.sub(r"\s+# .*", "", self.body.strip().split("\n")[0])


def blocks(text: str) -> list[Block]:
    found = []
    for match in FENCE.finditer(text):
        title = re.search(r'title="([^"]+)"', match["info"])
        line = text.count("\n", 0, match.start("body"))
        found.append(Block(match["language"], title[1] if title else "", match["body"], line))
    return found


def not_run() -> dict[Path, list[str]]:
    """The titles or first lines of the blocks that no test runs, of each page that has some."""
    found: dict[Path, list[str]] = {}
    for name, names in re.findall(r"^- ([\w/-]+\.md): (.+)$", UNTESTED.read_text(), re.M):
        found.setdefault(ROOT / ("" if name == "README.md" else "docs") / name, []).extend(
            re.findall("`([^`]+)`", names)
        )
    assert len(found) > 20
    return found


def run_here(page: Path) -> list[Block]:
    text, left_out = page.read_text(), not_run().get(page, [])
    elsewhere = ELSEWHERE.match(text)
    return [b for b in blocks(text) if b.language in ("python", "console") and not elsewhere and b.name not in left_out]


def printed(script: str) -> list[str]:
    """What the comments behind ``print`` show: values, and not words about them."""
    return re.findall(r"print\(.*\)  # ([\d\[].*|(?:True|False)\b.*)$", script, re.M)


def environment(*folders: Path) -> dict[str, str]:
    """Where a shell finds programs: in these folders before all others."""
    path = [*folders, Path(sys.executable).parent, os.environ["PATH"]]
    return {**os.environ, "PATH": ":".join(map(str, path))}


def run(command: str, folder: Path, *programs: Path) -> str:
    """Standard output, when the command succeeds; with everything that was said otherwise."""
    result = subprocess.run(
        command,
        cwd=folder,
        env=environment(*programs),
        shell=True,
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    return output(result)


def output(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 0, f"{result.args} ended with {result.returncode}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def agrees(expected: list[str], got: list[str]) -> bool:
    patterns = [".*".join(re.escape(part) for part in line.split("...")) for line in sorted(expected)]
    return len(expected) == len(got) and all(
        re.fullmatch(pattern, line) for pattern, line in zip(patterns, sorted(got), strict=True)
    )


@pytest.mark.parametrize("page", [*filter(run_here, PAGES)], ids=lambda page: str(page.relative_to(ROOT)))
def test_what_the_page_shows_happens(
    page: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, warm: Warm, warm_torch: Warm
) -> None:
    """Its programs begin in forks of an interpreter that has imported multiverso, or PyTorch, too."""
    given = ROOT / "tests" / "pages" / page.stem
    begin = (given / "given.py").read_text() if (given / "given.py").exists() else ""
    if given.exists():
        shutil.copytree(given, tmp_path, dirs_exist_ok=True)
    framework = re.search("(import|from) (torch|sklearn)", begin + page.read_text())
    warm = warm_torch if framework else warm
    programs = tmp_path_factory.mktemp("programs")
    warm.write_commands(programs)
    # each line where it stands on the page, so that a traceback names the page's lines
    script = ["from given import *"] if begin else []
    for block in run_here(page):
        if block.language == "python" and block.title:
            (tmp_path / block.title).write_text(block.body)
        elif block.language == "python":
            script += [""] * (block.line - len(script)) + block.body.splitlines()
        elif block.language == "console":
            for part in re.split(r"^\$ ", block.body, flags=re.M)[1:]:
                command, *expected = part.splitlines()
                found = () if "mpiexec" in command else (programs,)  # whose children they have to be
                got = run(command, tmp_path, *found).splitlines()
                assert agrees(expected, got), f"{command}\nexpected {expected}\ngot      {got}"
    if script:
        (tmp_path / "page.py").write_text("\n".join(script) + "\n")
        program = ("-W", "error", "page.py")
        said = output(warm.run(*program, cwd=tmp_path, env=environment(), timeout=DEADLINE_SECONDS)).splitlines()
        assert [line for line in printed("\n".join(script)) if line not in said] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_whatever_on_the_page_is_not_run_is_listed_with_the_reason(page: Path) -> None:
    text = page.read_text()
    found, here = blocks(text), run_here(page)
    assert text.count("```") == 2 * len(found), "a fence that is not closed, or not seen by this test"
    elsewhere = ELSEWHERE.match(text)
    if elsewhere:
        assert f'"{page.stem}"' in (ROOT / elsewhere[1]).read_text(), f"{elsewhere[1]} does not run this page"
        here = [b for b in found if b.language == "python"]
    commands = " ".join(b.body for b in here if b.language == "console")
    for block in here if not elsewhere else ():
        if block.language == "python" and block.title:
            assert block.title in commands, f"{block.title} is written but no console block runs it"
    left = sorted(b.name for b in found if b not in here and b.language != "mermaid")
    assert left == sorted(not_run().get(page, [])), "not run, and what docs/internals/untested.md lists of this page"


def test_commands_that_are_not_run_have_options_files_and_targets_that_exist() -> None:
    from multiverso.cli.main import app

    tried = 0
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
    for page in PAGES:
        text = "\n".join(b.body for b in blocks(page.read_text()) if b.language == "sh")
        lines = re.sub(r"\s+#.*", "", text)
        for name, arguments in re.findall(r"(?:^|\$ |\()multiverso (\w+)([^\n&)]*)", lines, re.M):
            command = app.commands[name]
            command.make_parser(click.Context(command, **command.context_settings)).parse_args(shlex.split(arguments))
            tried += 1
        for path in re.findall(r"(?:^|[ ./])((?:examples|benchmarks|scripts|tests)/\S+\.\w+)", lines, re.M):
            assert (ROOT / path).exists(), f"{page}: {path}"
            tried += 1
        for wanted in re.findall(r"pip install .*?\[([\w,]+)\]", lines):
            assert set(wanted.split(",")) <= extras | {"train"}, f"{page}: {wanted}"  # ray's own
        for target in re.findall(r"^make (\S+)", lines, re.M):
            assert target in targets, f"{page}: make {target}"
    assert tried > 20


def test_the_gallery_counts_the_lines_that_its_programs_mark() -> None:
    rows = re.findall(r"^\| `(examples/\S+)` \| (\d+) \+ (\d+) \|", (ROOT / "docs/gallery.md").read_text(), re.M)
    marked = {}
    for path in (ROOT / "examples").rglob("*.py"):
        added = len(re.findall(r"\S.*# multiverso$", text := path.read_text(), re.M))
        if added:
            changed = len(re.findall(r"^\s*# multiverso, was:", text, re.M))
            marked[str(path.relative_to(ROOT))] = added, changed
    assert {path: (int(added), int(changed)) for path, added, changed in rows} == marked


def lines_that_use_multiverso(text: str) -> tuple[int, int]:
    """Those with a name imported from multiverso or platoon, or with an object made by one; and all but empty ones."""
    nodes = list(ast.walk(ast.parse(text)))
    names, lines = set(), set()
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [node.module] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names]
            if any(re.match(r"(multiverso|platoon)\b", module or "") for module in modules):
                names |= {each.asname or each.name.split(".")[0] for each in node.names}
                lines.add(node.lineno)
    of_ours = re.compile(rf"({'|'.join(names)})\b[\w.]*\(")
    for node in nodes:
        made = [(item.optional_vars, item.context_expr) for item in node.items] if isinstance(node, ast.With) else []
        made += [(target, node.value) for target in node.targets] if isinstance(node, ast.Assign) else []
        calls = [(to, value) for to, value in made if isinstance(to, ast.Name) and isinstance(value, ast.Call)]
        names |= {to.id for to, value in calls if of_ours.match(ast.unparse(value))}
    lines |= {node.lineno for node in nodes if isinstance(node, ast.Name) and node.id in names}
    return len(lines), sum(bool(line.strip()) for line in text.splitlines())


def test_the_gallery_counts_the_lines_that_use_multiverso() -> None:
    shown = re.findall(r"(\d+) of (\d+) lines of\s+`(\S+)`", (ROOT / "docs/gallery.md").read_text())
    assert len(shown) > 5
    for used, of, path in shown:
        assert (int(used), int(of)) == lines_that_use_multiverso((ROOT / path).read_text()), path


def test_the_gallery_shows_what_its_programs_printed() -> None:
    page = (ROOT / "docs/gallery.md").read_text()
    noted = json.loads((ROOT / "docs/results/gallery.json").read_text())
    row = r"^\| `examples/(\S+)` \| \d+ \+ \d+ \| ([\d.]+) % \| ([\d.]+) % \| !\[[^]]+\]\(\S+\.svg\)"
    rows = {name: [one, two] for name, one, two in re.findall(row, page, re.M)}
    programs = [name for name in noted if not name.startswith(("resuming/", "platoon/"))]
    assert rows == {name: [f"{100 * noted[name][workers][-1]:.1f}" for workers in "12"] for name in programs}
    for name in programs:
        assert f"ends at {rows[name][0]} %, two at {rows[name][1]} %]" in page
    for name in set(noted) - set(programs):
        if name.startswith("platoon/"):
            figures = [f"{100 * figure(noted[name][workers]):.1f} %" for workers in "12" for figure in (min, last)]
        else:
            assert noted[name]["undisturbed"] == noted[name]["killed and resumed"], "the same, bit for bit"
            figures = [f"{100 * noted[name]['undisturbed'][0]:.2f}"]
        assert [figure for figure in figures if figure not in page] == [], name


def last(values: list[float]) -> float:
    return values[-1]


def test_the_table_of_rules_and_rates_is_what_was_measured() -> None:
    page = (ROOT / "docs/how-to/learning-rate.md").read_text()
    measured: dict[str, list[str]] = {}
    for name in ("sharing_loss", "sharing_loss_easgd_x4"):
        report = json.loads((ROOT / f"docs/results/{name}.json").read_text())
        assert f"which reaches {report['accuracy_of_one']:.2%}".replace("%", " %") in page
        for each in report["results"]:
            words = f"{each['points']:+.2f} ({each['low']:+.2f} to {each['high']:+.2f})"
            measured.setdefault(each["rule"], []).append(words)
    rows = re.findall(r"^\| (\S+ \([^|]*?\))(?:, added later)?" + 3 * r" \| ([+-]\d[^|]+)" + r" \|$", page, re.M)
    assert {rule: shown for rule, *shown in rows} == measured


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    missing = [p for page in PAGES[1:] if (p := str(page.relative_to(ROOT / "docs"))) not in navigation]
    assert not missing


DOCTESTS = '''
import ast, doctest, gc, importlib, pathlib, sys
gc.disable()  # a framework's million objects are there to stay
import multiverso
folder = pathlib.Path(multiverso.__file__).parent
documented = (ast.Module, ast.ClassDef, ast.FunctionDef)

def has_examples_that_run(path):
    """Many a module's are only to be read, and its framework takes seconds to import."""
    nodes = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, documented))
    texts = [ast.get_docstring(node) or "" for node in nodes]
    examples = [example for text in texts for example in doctest.DocTestParser().get_examples(text)]
    return any(doctest.SKIP not in example.options for example in examples)

tried = 0
for path in filter(has_examples_that_run, sorted(folder.rglob("*.py"))):
    name = ".".join(path.relative_to(folder.parent).with_suffix("").parts).removesuffix(".__init__")
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        # bindings of frameworks that are not in this environment; anything of our own must import
        assert error.name and not error.name.startswith("multiverso"), name
        continue
    result = doctest.testmod(module)
    tried += result.attempted
    if result.failed:
        sys.exit(1)
print(tried)
'''


def test_the_examples_in_docstrings_run(tmp_path: Path, warm_torch: Warm) -> None:
    (tmp_path / "examples.py").write_text(DOCTESTS)
    ran = warm_torch.run("examples.py", cwd=tmp_path, env=environment(), timeout=DEADLINE_SECONDS)
    assert int(output(ran)) > 0


def test_every_variable_of_the_environment_is_documented() -> None:
    sources = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    names = set(re.findall(r'"((?:MULTIVERSO|PLATOON)(?:_[A-Z_]+|RC))"', sources))
    pages = "\n".join(page.read_text() for page in PAGES)
    assert names
    assert sorted(name for name in names if name not in pages) == []


def test_every_error_has_its_section() -> None:
    page = (ROOT / "docs/troubleshooting.md").read_text()
    found = vars(importlib.import_module("multiverso.errors")).values()
    errors = {kind.__name__ for kind in found if isinstance(kind, type) and issubclass(kind, Exception)}
    assert errors == set(re.findall(r"^### (\w+)$", page, re.M))


def messages() -> str:
    """Every text of the sources, a line each; what is filled in is left out."""

    def text(node: ast.AST) -> str | None:
        if isinstance(node, ast.JoinedStr):
            return "".join(text(part) or "" for part in node.values)
        return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None

    trees = (ast.parse(path.read_text()) for path in (ROOT / "src/multiverso").rglob("*.py"))
    return "\n".join(found for tree in trees for node in ast.walk(tree) if (found := text(node)) and "\n" not in found)


def test_messages_on_the_page_of_errors_are_those_that_appear() -> None:
    shown = re.findall(r'(?:^|- )"([^"]+)"', (ROOT / "docs/troubleshooting.md").read_text(), re.M)
    assert len(shown) > 10
    said = messages()
    for message in shown:
        pattern = ".*".join(re.escape(part.strip()) for part in message.split("..."))
        assert re.search(pattern, said), message


def test_the_command_line_page_has_every_command_and_option() -> None:
    from multiverso.cli.main import app

    hooks = runpy.run_path(str(ROOT / "scripts/docs_hooks.py"))
    page = hooks["with_options"]((ROOT / "docs/reference/cli.md").read_text())
    sections = {part.split("\n")[0]: part for part in page.split("\n## multiverso ")[1:]}
    commands = app.commands
    assert set(sections) == set(commands)
    for name, command in commands.items():
        shown = [o for o in command.params if o.param_type_name == "option" and not o.hidden]
        options = {max(o.opts, key=len) for o in shown} - {"--help"}
        assert [option for option in options if f"`{option}`" not in sections[name]] == [], name
