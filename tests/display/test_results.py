from __future__ import annotations

import math
import pickle
import re
from typing import Any

import pandas as pd
import pytest

from workbench.display.headlines import looked_at
from workbench.display.results import Results, sparkline

ROWS = [
    {"iteration": n, "generate_sequences/response_tokens/mean": 40.0 + n, "compute_values/values/mean": 0.5,
     "compute_reward/rewards/mean": n / 10, "compute_reward/rewards/interval95": 0.03,
     "update_critic/loss": 9.0, "update_critic/grad_norm": 8.0, "compute_advantages/reference_kl": 0.01 * n,
     "update_actor/first_minibatch/loss": 7.0, "update_actor/loss": -0.1, "update_actor/grad_norm": 2.0,
     "update_actor/clip_fraction": 0.2}
    for n in range(1, 4)
]  # fmt: skip
FIRST = [
    "compute_reward/rewards/mean", "compute_reward/rewards/interval95", "compute_advantages/reference_kl",
    "update_actor/loss", "update_actor/grad_norm", "update_actor/clip_fraction",
    "generate_sequences/response_tokens/mean",
]  # fmt: skip


def made(rows: int = 3, seconds: float = 2.0) -> Results:
    many = [{**ROWS[n % 3], "iteration": n + 1} for n in range(rows)]
    return Results.of(many, algorithm="PPO", seconds=[seconds] * rows)


def test_what_one_looks_at_is_in_front_and_nothing_is_lost() -> None:
    frame = made()
    assert list(frame.columns[:7]) == FIRST and set(frame.columns) == set(ROWS[0]) - {"iteration"}
    assert frame.index.tolist() == [1, 2, 3] and frame["compute_reward/rewards/mean"].tolist() == [0.1, 0.2, 0.3]


def test_the_kl_that_one_looks_at_is_that_to_the_reference() -> None:
    names = ["update_actor/approximate_kl", "update_actor/kl_loss"]  # of GRPO, whose penalty is in the loss
    assert looked_at(names)["KL"] == "update_actor/kl_loss"
    assert looked_at(["update_critic/loss", "update_actor_2/loss"])["loss"] == "update_actor_2/loss"


def test_runs_with_equal_metrics_are_equal_however_long_they_took() -> None:
    pd.testing.assert_frame_equal(made(seconds=2.0), made(seconds=3.0))
    assert made(seconds=3.0).attrs["seconds"] == [3.0, 3.0, 3.0]


def test_parts_of_it_are_plain_frames_and_it_can_be_sent() -> None:
    frame = made()
    assert type(frame.head(1)) is pd.DataFrame and type(frame[FIRST[:1]]) is pd.DataFrame
    again = pickle.loads(pickle.dumps(frame))
    pd.testing.assert_frame_equal(again, frame)
    assert again.attrs == frame.attrs


def test_the_view_has_headlines_with_interval_and_curves_and_a_fold_of_the_rest() -> None:
    html = made()._repr_html_()
    above, _, fold = html.partition("<details")
    labels = ["iteration", "reward", "KL", "loss", "gradient norm", "clip fraction", "response tokens", "seconds"]
    assert re.findall(r"<th [^>]*>([^<]*)</th>", above) == labels
    assert "PPO: 3 iterations in 6.0 s" in above and "0.3 &#177; 0.03" in above and above.count("<img") == 7
    hidden = ["compute_reward/rewards/interval95", "update_critic/loss", "update_actor/first_minibatch/loss"]
    assert all(name in fold for name in hidden) and fold.count("<img") == 5
    assert '<img alt="reward: from 0.1 to 0.3, last 0.3"' in above


def test_of_many_iterations_it_shows_the_last() -> None:
    html = made(50)._repr_html_()
    assert "30 earlier iterations are in the frame" in html and ">31<" in html and ">30<" not in html


def test_the_view_of_what_was_changed_in_place() -> None:
    frame = made()
    frame["<b>words"] = ["a", "b", "c"]
    frame.loc[4] = frame.loc[3]
    html = frame._repr_html_()
    assert "seconds" not in html and "&lt;b&gt;words" in html
    assert "iterations" in Results.of([], algorithm="PPO", seconds=[])._repr_html_()


def test_a_sparkline_has_gaps_and_ends_with_its_last_number() -> None:
    svg = sparkline([1.0, 2.0, math.nan, 3.0, math.inf], "x & y")
    assert svg.count("<polyline") == 2 and "last 3" in svg and "x &amp; y" in svg
    assert sparkline([math.nan], "nothing") == ""


def test_it_is_drawn_by_matplotlib() -> None:
    matplotlib = pytest.importorskip("matplotlib")  # of the extra "notebook"
    matplotlib.use("agg")
    axes: Any = made().plot(y=FIRST[0])
    assert axes.lines[0].get_ydata().tolist() == [0.1, 0.2, 0.3]


def test_what_prints_is_what_one_looks_at() -> None:
    printed = repr(made())
    assert "reward" in printed and "0.3 ± 0.03" in printed and "gradient norm" in printed and "seconds" in printed
    assert "..." not in printed and "5 other columns" in printed and max(map(len, printed.splitlines())) < 130
    assert "30 earlier iterations" in repr(made(50))
    assert "update_critic" in made().to_string()
