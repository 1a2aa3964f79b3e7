"""Numbers by token and their colours, against closed forms."""

from __future__ import annotations

import math

import pytest
import torch

from workbench.display.palette import Scale
from workbench.objectives.losses import ppo_loss
from workbench_widgets.sample_pictures import number, scale_of, token
from workbench_widgets.sample_rows import Sample, beside_columns, common, token_texts, up_to

LOW, HIGH = 0.2, 0.28


def sample(ids: list[int], mask: list[int] | None = None, **columns: list[float]) -> Sample:
    kept = torch.tensor(mask or [1] * len(ids), dtype=torch.bool)
    return Sample(
        row=0, prompt="", token_ids=ids, mask=kept, columns={n: torch.tensor(v).double() for n, v in columns.items()}
    )


def test_what_is_beside_counts_up_to_where_the_responses_part() -> None:
    mine = sample([4, 5, 6], old_log_prob=[-1.0, -2.0, -3.0])
    after = sample([4, 5, 9, 9], old_log_prob=[-0.5, -2.5, -0.1, -0.1])
    assert (common(mine, after), common(after, after), common(mine, sample([]))) == (2, 4, 0)
    found = beside_columns(mine, after, LOW, HIGH)
    assert found["new_log_prob"].tolist()[:2] == [-0.5, -2.5]
    assert found["new_ratio"].tolist()[:2] == pytest.approx([math.exp(0.5), math.exp(-0.5)])
    assert found["outside_range"].tolist() == [1.0, -1.0, 0.0]
    assert "clipped" not in found  # without advantages it is not known
    assert math.isnan(found["new_ratio"][2])
    cut = up_to(2, after.columns["old_log_prob"], 5)
    assert cut.tolist()[:2] == [-0.5, -2.5] and cut[2:].isnan().all() and len(cut) == 5


def test_the_clip_range_has_its_bounds_inside() -> None:
    ratios = [0.79, 0.8, 1.0, 1.28, 1.29, math.nan]
    found = beside_columns(sample([1] * 6, ratio=ratios), None, LOW, HIGH)
    assert found["outside_range"].tolist() == [-1, 0, 0, 0, 1, 0]
    assert "clipped" not in found  # no loss clips this ratio


def test_clipped_is_what_the_loss_clips() -> None:
    ratios, advantages = [1.5, 1.5, 0.5, 0.5, 1.1, 1.5], [1.0, -1.0, 1.0, -1.0, 1.0, 0.0]
    logs = [math.log(ratio) for ratio in ratios]
    mine = sample([1] * 6, old_log_prob=[0.0] * 6, advantages=advantages)
    found = beside_columns(mine, sample([1] * 6, old_log_prob=logs), LOW, HIGH)
    assert found["outside_range"].tolist() == [1, 1, -1, -1, 0, 1]
    assert found["clipped"].tolist() == [1, 0, 0, -1, 0, 0]
    _, stats = ppo_loss(
        torch.tensor([logs]).double(), torch.zeros(1, 6).double(), torch.tensor([advantages]).double(), LOW, HIGH
    )
    assert found["clipped"].bool().tolist() == stats.clipped_BT[0].tolist()


def test_means_leave_out_what_the_policy_did_not_choose() -> None:
    turns = sample([1, 2, 3, 4], [1, 0, 0, 1], advantages=[1.0, 50.0, 50.0, 2.0])
    assert turns.mean("advantages") == 1.5
    assert math.isnan(sample([1], [0], advantages=[1.0]).mean("advantages"))


def test_tokens_read_as_they_do_in_their_text() -> None:
    words = {1: "▁a", 2: "▁b", 3: "\n", 4: "�"}

    def decode(ids: list[int]) -> str:  # as SentencePiece: the first space of a text is dropped
        return "".join(words[i] for i in ids).replace("▁", " ").removeprefix(" ")

    assert token_texts([1, 2, 3, 4, 1], decode) == ["a", " b", "\n", "⟨4⟩", " a"]
    assert token_texts([], decode) == []


def test_scales_have_no_colour_at_their_centre_and_the_same_strength_on_both_sides() -> None:
    diverging = Scale(kind="diverging", limit=2.0)
    assert [diverging.place(v) for v in (-9.0, -1.0, 0.0, 2.0)] == [-1.0, -0.5, 0.0, 1.0]
    assert diverging.colour(0.0) == diverging.colour(math.nan) == ""
    assert diverging.colour(-2.0)[-2:] == diverging.colour(7.0)[-2:]
    assert diverging.colour(-2.0)[:-2] != diverging.colour(2.0)[:-2]
    ratio = Scale(kind="ratio", limit=math.log(2))
    assert [ratio.place(v) for v in (0.5, 1.0, 2.0)] == pytest.approx([-1, 0, 1])
    assert ratio.at(-1.0) == pytest.approx(0.5)
    assert ratio.place(0.0) == -1.0
    sequential = Scale(kind="sequential", limit=4.0)
    assert [sequential.place(v) for v in (0.5, 0.0, -2.0, -9.0)] == [0.0, 0.0, -0.5, -1.0]


def test_a_scale_is_as_wide_as_its_numbers() -> None:
    assert scale_of("advantages", [torch.tensor([-3.0, 1.0])]).limit == pytest.approx(3.0, rel=0.05)
    assert scale_of("old_log_prob", [torch.tensor([-3.0, -1.0])]).kind == "sequential"
    assert scale_of("new_ratio", [torch.tensor([1.0, 4.0, 0.25])]).limit == pytest.approx(math.log(4))
    outlier = torch.cat([torch.full((999,), 1.0), torch.tensor([1e6])])
    assert scale_of("values", [outlier]).limit == 1.0
    assert scale_of("values", [torch.tensor([math.nan, math.inf])]).limit == 1.0
    assert scale_of("values", [torch.zeros(5)]).limit == 1.0
    told = Scale(kind="diverging", limit=0.5).legend("kl", "nats")
    assert "≤ −0.5" in told and "≥ 0.5" in told and "nats" in told


def test_tokens_are_escaped_and_show_what_cannot_be_seen() -> None:
    html = token(' <b>\n"', 'it says "<"', "#0072b280", sign="▲")
    assert "·&lt;b&gt;↵\n&quot;" in html and "<b>" not in html
    assert 'title="it says &quot;&lt;&quot;"' in html
    assert "background:#0072b280" in html and "▲</sup>" in html
    assert token("a\n", "", "", sign="▼").endswith("▼</sup>\n</span>")
    assert "line-through" in token("x", "", "", masked=True, sign="▲")
    assert number(-0.1234567) == "−0.123457" and number(math.nan) == "none"
