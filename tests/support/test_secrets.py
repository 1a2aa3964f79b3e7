"""What looks like a secret is masked before it is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from workbench.support.secrets import MASK, masked
from workbench.telemetry.store import TelemetryStore

SECRET = "s3cretS3cretS3cret"
HIDDEN = [
    f'HF_TOKEN = "{SECRET}"',
    f"token = '''{SECRET}'''",
    f'password: str = "{SECRET}"',
    f'os.environ["OPENAI_API_KEY"] = "{SECRET}"',
    f'os.environ.setdefault("MY_SECRET", f"{SECRET}")',
    f'login(token="{SECRET}")',
    f'd = {{"api_key": "{SECRET}", "n": 1}}',
    f'headers = {{"Authorization": "Bearer {SECRET}"}}',
    f"%env WANDB_API_KEY={SECRET}",
    f"%env WANDB_API_KEY {SECRET}",
    f"!export GITHUB_TOKEN={SECRET}",
    f"!tool --api-key {SECRET} --rows 3",
    f"!tool --access-key={SECRET}",
    f'requests.get("https://me:{SECRET}@host/x")',
    f"print('hf_{SECRET}')",
    f"x = 'sk-{SECRET}'",
    f"y = 'github_pat_{SECRET}'",
]
SHOWN = [
    "max_new_tokens=64",
    'stop = ("\\n",)',
    'tokenizer = "abc"',
    'sort_values(key="reward")',
    'micro_batch_tokens = "x"',
    "stop_token_ids=(2,)",
    "# tokens, keys, and a secret",
    'columns = ["response_ids", "token_level_rewards"]',
]


@pytest.mark.parametrize("text", HIDDEN)
def test_a_secret_is_masked(text: str) -> None:
    assert SECRET not in masked(text)
    assert MASK in masked(text)
    assert masked(masked(text)) == masked(text)


@pytest.mark.parametrize("text", SHOWN)
def test_what_is_none_stays(text: str) -> None:
    assert masked(text) == text


def test_events_are_masked_on_disk(tmp_path: Path) -> None:
    store = TelemetryStore(tmp_path / "run")
    for text in HIDDEN:
        store.append_event("cell", text=text)
    store.append_event("script", command=["run.py", "--api-key", SECRET], options={"api_key": SECRET, "rows": 3})
    written = "".join(file.read_text() for file in (tmp_path / "run").iterdir())
    assert SECRET not in written
    assert store.events()["details"].iloc[-1] == {
        "command": ["run.py", "--api-key", MASK],
        "options": {"api_key": MASK, "rows": 3},
    }
