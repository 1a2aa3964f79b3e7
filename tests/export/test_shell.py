from __future__ import annotations

from tests.expected import expect_error
from tests.export.test_adversarial import page
from workbench.errors import BadInput
from workbench.export.cells import only_looks
from workbench.export.exporting import script_of

LOOKS = (
    "ls", "ls -l /data", "nvidia-smi", "nvidia-smi -L", "nvidia-smi --query-gpu=memory.used --format=csv", "pwd",
    "cat run.log | tail -3", "df -h; free -g", "pip list 2>/dev/null", "git log -3", "date +%F", "wc -l $path",
    "head -2 {path}", "ls missing 2>&1",
)  # fmt: skip
CHANGES = (
    "", "rm x", "ls > files.txt", "ls >> files.txt", "cat a | tee b", "ls && rm x", "ls & rm x", "ls; rm x",
    "ls | rm x",
    "nvidia-smi --gpu-reset", "nvidia-smi -pm 1", "date -s 12:00", "hostname other", "pip install x", "git pull",
    "git log --output=x", "git", "wb stop mine", "echo $(rm x)", "echo `rm x`", "ls {remove()}",
    "ls\nrm x", "ls |",
    "(rm x)", "A=1 ls", "cat <(rm x)", "python train.py", "ls 2> errors.txt",
)  # fmt: skip


def test_lines_that_only_show_something() -> None:
    for line in LOOKS:
        assert only_looks(line)


def test_lines_that_may_change_something() -> None:
    for line in CHANGES:
        assert not only_looks(line)


def test_a_script_leaves_out_shell_lines_that_only_show_something_and_a_note_names_them() -> None:
    script = script_of(page("!nvidia-smi -L", "import os\nif True:\n    !ls -l\n    os.putenv('A', '1')", "!!pwd"))
    assert script.told[:3] == (
        "cell 1: `!nvidia-smi -L` is left out: it only shows something",
        "cell 2: `!ls -l` is left out: it only shows something",
        "cell 3: `!pwd` is left out: it only shows something",
    )
    assert "get_ipython" not in script.text and "ls -l" not in script.text and 'os.putenv("A", "1")' in script.text


def test_a_shell_line_whose_output_is_used_is_refused() -> None:
    with expect_error(BadInput, remedy="subprocess"):
        script_of(page("files = !ls\nprint(files)"))
