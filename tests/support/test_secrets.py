"""Text that looks like a secret is masked before it is written."""

from __future__ import annotations

import ast
import secrets
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from workbench.support.random_text import looks_random
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
    f"x = 'gsk_{SECRET}'",
    f"x = 'npm_{SECRET}'",
    f"print('a\\nhf_{SECRET}')",
    f'token = """first\n{SECRET}\n"""',
    f'token = (\n    "{SECRET}"\n)',
    f'token = os.getenv("X") or "{SECRET}"',
    f'token = os.environ.get("X", "{SECRET}")',
    f'os.getenv("HF_TOKEN", default="{SECRET}")',
    f'token: str | None = "{SECRET}"',
    f'hfToken = "{SECRET}"',
    f'OPENAI_API_KEY_2 = "{SECRET}"',
    f'password = "a\\"{SECRET}"',
    f'password = "a" "b\\n{SECRET}"',
    f'user, password = "me", "{SECRET}"',
    f'def f(rows, *, token="{SECRET}", n=3): pass',
    f'(token := "{SECRET}")',
    f'api_keys = ["a", "{SECRET}"]',
    f'{{"api_key": ["a", "{SECRET}"]}}',
    f'{{"Authorization": "{SECRET}"}}',
    f'login("{SECRET}")',
    f'token = f"{{user}}-{SECRET}"',
    f'token = SecretStr("{SECRET}")',
    f'subprocess.run(["tool", "--api-key", "{SECRET}"])',
    f'os.system("tool --api-key {SECRET} --rows 3")',
    f"os.system(f'tool --api-key {SECRET} --rows {{n}}')",
    f'parser.add_argument("--token", default="{SECRET}")',
    f'text = \'{{"token": "{SECRET}"}}\'',
    f'text = "{{\\"token\\": \\"{SECRET}\\"}}"',
    f'x = 1  # token = "{SECRET}"',
    f'é = "ü"; token = "{SECRET}"',
    f'x = 1\r\ntoken = "{SECRET}"\r\n',
    f'!pip install x\ntoken = (\n    "{SECRET}")',
    f'%%time\ntoken = (\n    "{SECRET}")',
    f'files = !ls \\\n  -l\ntoken = (\n    "{SECRET}")',
    f'token = "{SECRET}"\nnot python',
    f'token = os.getenv("X") or "{SECRET}"\nnot python',
    f'token = """a\n{SECRET}"""\nnot python',
    f"!HF_TOKEN={SECRET} python x.py",
    f"%%bash\nHF_TOKEN={SECRET} python x.py",
    f"%%bash\nHF_TOKEN={SECRET}",
    f"%%writefile settings.yaml\nrows: 3\napi_key: {SECRET}",
    f"!tool --password a,(b)\\$%{SECRET} --rows 3",
    f"!docker login -u me -p {SECRET}",
    f"!curl -H 'Authorization: token {SECRET}' host",
    f"!curl -H 'X-Api-Key: {SECRET}' host",
    f'connect("postgres://u:p@{SECRET}@h/db")',
    f'clone("https://{SECRET}@github.com/x")',
    f'connect("redis://:{SECRET}@h")',
    f'key = "-----BEGIN RSA PRIVATE KEY-----\\n{SECRET}\\n-----END RSA PRIVATE KEY-----"',
]
# These names often hold no secret. A value is masked only if it looks like one.
RANDOM = [
    SECRET, "0123456789abcdef" * 2, "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "550e8400-e29b-41d4-a716-446655440000",
    "JBSWY3DPEHPK3PXP", "aBcDxYzQrStUvWmNoPqR", "qwhezrtdmvoqpxkfjdhsayncbwlu", "AbC1_dEf2-GhI3_jKl4-MnO5",
]  # fmt: skip
WORDS = [
    "reward",
    "response_length_p95",
    "generate_sequences/sync_gap/mean",
    "meta-llama/Llama-3.1-8B-Instruct",
    "gsm8k_train_v2",
    "tokenLevelRewardsMean",
    "maxNewTokensPerRow",
    "20261124-002637-683609",
    "kl_coefficient=0.05,clip=0.2",
    "a long text 1a2b3c4d5e",
    "internationalization",
    "<|reserved_special_token_5|>",
    "Qwen2.5-0.5B-Instruct-GPTQ-Int8",
    "Qwen3ForCausalLM",
    "/data/runs/ppo_v3/step_000120",
]
PERHAPS = [
    'key = "{}"',
    'my_key: str = "{}"',
    'tokens = ["{}"]',
    'tokens = {{"a": ("b", "{}")}}',
    'hf_tokens = "{}"',
    'OPENAI_KEY = "{}"',
    'f(key="{}")',
    'os.environ["WANDB_KEY"] = "{}"',
    '{{"key": "{}"}}',
    'def f(key="{}"): pass',
    'os.getenv("X_KEY", "{}")',
    'text = \'{{"key": "{}"}}\'',
    "%env MY_KEY={}",
    "%env MY_KEY {}",
    "!tool --key {} --rows 3",
    "!tool --key={}",
    "!X_KEY={} tool",
    "%%writefile settings.yaml\nkey: {}",
    '["tool", "--key", "{}"]',
    'x = 1  # key = "{}"',
    'key = "{}"\nnot python',
]
SHOWN = [
    "tokens = [1, 2, 3]",
    'max_tokens = {"mean": 3}',
    'key = ("data_source", "reward_model")',
    "max_new_tokens=64",
    'stop = ("\\n",)',
    'tokenizer = "abc"',
    'sort_values(key="reward")',
    'micro_batch_tokens = "x"',
    "stop_token_ids=(2,)",
    "# tokens, keys, and a secret",
    'columns = ["response_ids", "token_level_rewards"]',
    'from_pretrained("gpt2", pad_token="<pad>", eos_token="</s>", mask_token="<m>", stopToken=".")',
    'if token == "yes" or "no" != password: pass',
    'print("token:", "hello")',
    'token = "" if mode == "quick" else None',
    'token = os.environ["HF_TOKEN"]',
    'token = os.getenv("HF_TOKEN")',
    'token = getpass("the token: ")',
    'token = open("token.txt").read().split("\\n")[0]',
    'headers = {"Authorization": f"Bearer {token}"}',
    'print(f"token={token} --token {token}", f"{f(token=3)}")',
    'clone(f"https://{user}:{token}@github.com")',
    "!tool --token $HF_TOKEN && tool --token=${HF_TOKEN}",
    'os.system("tool --token %s --key <your token>" % x)',
    'df["token"] = df["token"].replace("a", "b")',
    "!git clone ssh://git@github.com/x",
    'open("http://localhost:8000/x@y")',
    "# Basic training of the policy",
]


def test_a_secret_is_masked() -> None:
    for text in HIDDEN:
        assert SECRET not in masked(text)
        assert MASK in masked(text)
        assert masked(masked(text)) == masked(text)


def test_what_is_none_stays() -> None:
    for text in SHOWN:
        assert masked(text) == text


def test_what_looks_random_is_masked_under_a_name_that_may_hold_a_secret() -> None:
    for text in PERHAPS:
        for secret in RANDOM:
            assert masked(text.format(secret)) == text.format(MASK)
        for word in WORDS:
            assert masked(text.format(word)) == text.format(word)


@pytest.mark.parametrize("draw", [secrets.token_hex, secrets.token_urlsafe])
def test_most_drawn_keys_look_random(draw: Callable[[int], str]) -> None:
    assert sum(looks_random(draw(24)) for _ in range(500)) > 450


def test_options_of_a_name_that_may_hold_a_secret() -> None:
    options = {"key": SECRET, "tokens": ["a", {"b": SECRET}], "keys": [1, "reward"], "rows": SECRET}
    assert masked(options) == {"key": MASK, "tokens": ["a", {"b": MASK}], "keys": [1, "reward"], "rows": SECRET}
    assert masked(["run.py", "--key", SECRET, "--sort-key", "reward", SECRET]) == [
        "run.py", "--key", MASK, "--sort-key", "reward", SECRET
    ]  # fmt: skip


def test_python_stays_python() -> None:
    for text in [*HIDDEN, *SHOWN]:
        try:
            ast.parse(text)
        except SyntaxError:
            continue
        ast.parse(masked(text))


@pytest.mark.parametrize("form", ["AKIA" + "A1" * 8, "ASIA" + "A1" * 8])
def test_a_key_of_a_known_form_is_masked(form: str) -> None:
    assert masked(f'x = "{form}"') == f'x = "{MASK}"'


def test_a_key_of_wandb_is_masked() -> None:
    key = "0123456789abcdef" * 2 + "01234567"
    for text in (f'wandb.login(key="{key}")', f"!wandb login {key}", f"!wandb login --relogin {key}"):
        assert masked(text) == text.replace(key, MASK)
    assert masked(f'load(revision="{key}")') == f'load(revision="{key}")'


def test_only_the_secret_word_of_a_command_is_masked() -> None:
    assert masked(["--user", "pw", "--password", "pw"]) == ["--user", "pw", "--password", MASK]
    assert masked(["env", f"HF_TOKEN={SECRET}", "--api-key=x"]) == ["env", f"HF_TOKEN={MASK}", f"--api-key={MASK}"]
    assert masked({"api_key": ["a", {"b": "c"}], "rows": ["a"]}) == {"api_key": [MASK, {"b": MASK}], "rows": ["a"]}


def test_only_the_value_is_masked() -> None:
    text = 'token = os.getenv("X") or "abc"  # why\nlogin(token="abc", host="h")'
    assert masked(text) == f'token = os.getenv("X") or "{MASK}"  # why\nlogin(token="{MASK}", host="h")'


def seconds(text: str) -> float:
    took = []
    for _ in range(3):
        began = time.thread_time()
        masked(text)
        took.append(time.thread_time() - began)
    return max(min(took), 0.002)


def grows_linearly(frame: str, piece: str, size: int) -> bool:
    small, large = (frame.replace("{}", piece * (n // len(piece))) for n in (size, 4 * size))
    return seconds(large) < 8 * seconds(small)


def test_a_cell_takes_time_that_grows_linearly() -> None:
    assert grows_linearly('log("token", "{}")', "x9_-Qt0", 25_000)


@pytest.mark.thorough
@pytest.mark.parametrize("piece", ["a-", "x9_-Qt0"])
@pytest.mark.parametrize("frame", ['x = "{}"', 'log("token", "{}")', "{}", "%%bash\necho token {}"])
def test_so_does_a_large_one(piece: str, frame: str) -> None:
    assert grows_linearly(frame, piece, 250_000)


HOSTILE = ["eyJ-", "eyJaaaaaaaaaaaa.", "token-", "token=", "token: '", "--", "login ", "://a", "-----BEGIN ", "%env "]
HOSTILE += [
    "key=",
    "keys ",
    "key=aA1bB2cC3dD4eE5f(",
    'token="""',
    "{",
    "#",
    "=!",
    "password.",
    "Basic a",
    "https://a",
    "'token',",
    "A=",
    "x=[",
    "\n",
    "?",
    "[!",
]


@pytest.mark.thorough
@pytest.mark.parametrize("piece", HOSTILE)
@pytest.mark.parametrize("frame", ['log("token", "{}")', "token {}", "%%bash\ntoken {}"])
def test_hostile_text_takes_time_that_grows_linearly(piece: str, frame: str) -> None:
    assert grows_linearly(frame, piece, 25_000)


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
