"""Chooses which parts of the jobs `multiverso top` shows; keys change that."""

from typing import NamedTuple

# Of the table of workers.
COLUMNS = (
    "worker", "pid", "state", "cpu", "memory", "op/s", "past", "stale", "lag", "waits for", "since", "missing",
    "waited", "cost", "logged",
)  # fmt: skip
_SORTED = {"P": "cpu", "M": "memory"}
_END = 1 << 30  # a line below the last one
HELP = """\
Keys of multiverso top

q, Ctrl-C           end
s                   the slowest worker first; again: by number
P                   the one that uses most of a processor first
M                   the one that uses most memory first
< and >             by the previous or next column
/                   only workers whose line contains what is typed now: return keeps it, Escape shows all again
up, down, k, j      a line up or down
page up, page down  a screen up or down
Home, End           the first lines, the last ones
h, ?                this help; any key leaves it"""


class View(NamedTuple):
    """The part of the jobs that is shown.

    Attributes:
        sort: the column by which the workers are sorted; "slow": the one first that costs the others most.
        only: a part of the lines of the workers that are shown.
        typing: keys are for ``only``.
        help: the keys are shown instead of the jobs.
        first: the line at the top.
    """

    sort: str = "worker"
    only: str = ""
    typing: bool = False
    help: bool = False
    first: int = 0

    @property
    def column(self) -> str:
        """The column that decides the order."""
        return "cost" if self.sort == "slow" else self.sort

    @property
    def keys(self) -> str:
        """Returns the last line of the screen: the keys, or the text that is being typed."""
        if self.help:
            return "any key: back"
        if self.typing:
            return f"only workers with: {self.only}_   return keeps it, Escape shows all"
        only = f"only workers with {self.only} (Escape: all)" if self.only else "finds"
        slow = "by number" if self.sort == "slow" else "the slowest first"
        return f"q ends   h help   s: {slow}   < >: by {self.column}   /: {only}   up, down: further lines"


def after(view: View, key: str, page: int) -> View | None:
    """Returns what is shown after a key was pressed; None: the end.

    Args:
        view: what was shown.
        key: a letter, a key's name, or nothing.
        page: how many lines are seen at a time.
    """
    if not key:
        return view
    if view.help:
        return view._replace(help=False)
    if view.typing:
        return _typed(view, key)
    if key == "q" or (key == "escape" and not view.only):
        return None
    if key in ("escape", "/"):
        return view._replace(only="", typing=key == "/")
    if key in ("h", "?"):
        return view._replace(help=True)
    if key == "s":
        return view._replace(sort="worker" if view.sort == "slow" else "slow")
    if key in ("<", ">"):
        return view._replace(sort=COLUMNS[(COLUMNS.index(view.column) + (1 if key == ">" else -1)) % len(COLUMNS)])
    steps = {"up": -1, "k": -1, "down": 1, "j": 1, "page up": -page, "page down": page, "home": -_END, "end": _END}
    return view._replace(sort=_SORTED.get(key, view.sort), first=view.first + steps.get(key, 0))


def _typed(view: View, key: str) -> View:
    if key in ("enter", "escape"):
        return view._replace(typing=False, only=view.only if key == "enter" else "")
    if key == "backspace":
        return view._replace(only=view.only[:-1])
    return view._replace(only=view.only + key) if len(key) == 1 and key.isprintable() else view
