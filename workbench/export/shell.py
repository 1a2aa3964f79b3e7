"""Shell lines of a notebook that only show something: a script leaves them out."""

from __future__ import annotations

import re
import shlex

# Programs that write nothing, whatever they are given.
LOOKING = {
    "cat", "cmp", "cut", "df", "diff", "du", "echo", "egrep", "fgrep", "free", "grep", "groups", "head", "id", "ls",
    "lsblk", "lscpu", "lspci", "md5sum", "nproc", "printenv", "ps", "pwd", "sha256sum", "stat", "tail",
    "uname", "uptime", "vmstat", "wc", "whereis", "which", "whoami",
}  # fmt: skip
# Programs that can also change something: what each argument is where they do not.
CAREFUL = {
    "date": r"\+.*|-[uIR]",
    "hostname": r"-[fisId]",
    "nvidia-smi": r"-L|-q|-x|-[id]|[\w.,]+|topo|-m|--(query-[\w-]+|format|id|list-gpus|query|display)(=.*)?",
}
# Programs with subcommands of which these only show something.
SUBCOMMANDS = {
    "conda": {"info", "list"}, "git": {"log", "rev-parse", "status"}, "pip": {"freeze", "list", "show"},
    "wb": {"doctor", "ls"},
}  # fmt: skip
JOINED = {"|", "||", "&&", ";"}
SILENCED = re.compile(r"\d?>\s*/dev/null(?=\s|$)|2>&1")
FILLED_IN = re.compile(r"\$\w+|\{\w+\}")  # IPython puts the value of a variable there


def only_looks(line: str) -> bool:
    """Whether a shell line, as written behind `!`, changes no file, process or device: programs that only show
    something, with pipes between them, no redirection to a file and nothing that the shell or Python would run first.
    What is not known counts as a change."""
    plain = SILENCED.sub("", FILLED_IN.sub("value", line))
    if re.search(r"[$`{\n]", plain):
        return False
    words = shlex.shlex(plain, posix=True, punctuation_chars=True)
    words.whitespace_split, words.commenters = True, ""
    try:
        found = list(words)
    except ValueError:  # a quotation without an end
        return False
    commands: list[list[str]] = [[]]
    for word in found:
        if word in JOINED:
            commands.append([])
        else:
            commands[-1].append(word)
    return all(map(_looks, commands))


def _looks(words: list[str]) -> bool:
    if not words or any(re.fullmatch(r"[()<>|&;]+", word) for word in words):
        return False
    program, given = words[0], words[1:]
    if program in SUBCOMMANDS:
        return bool(given) and given[0] in SUBCOMMANDS[program] and not any(w.startswith("--output") for w in given)
    if program in CAREFUL:
        return all(re.fullmatch(CAREFUL[program], word) for word in given)
    return program in LOOKING
