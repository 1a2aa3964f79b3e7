"""Make test.jsonl beside this script from GSM8K's test split: `python make.py TEST.JSONL`.

TEST.JSONL is https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data/test.jsonl; its
checksum is compared.
"""

from __future__ import annotations

import hashlib
import random
import sys
from pathlib import Path

SOURCE_SHA256 = "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14"
ROWS, SEED = 200, 0


def main() -> None:
    source = Path(sys.argv[1]).read_bytes()
    if hashlib.sha256(source).hexdigest() != SOURCE_SHA256:
        sys.exit(f"{sys.argv[1]} is not the test split whose sha256 is {SOURCE_SHA256}")
    lines = source.splitlines()
    chosen = sorted(random.Random(SEED).sample(range(len(lines)), ROWS))
    Path(__file__).with_name("test.jsonl").write_bytes(b"".join(lines[i] + b"\n" for i in chosen))


if __name__ == "__main__":
    main()
