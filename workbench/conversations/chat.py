"""A conversation stepped by hand: `chat = lab.conversation(row, environment=...)`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
import torch

from workbench.algorithms.lab import Lab
from workbench.batches.batch import Batch
from workbench.batches.columns import Ragged, Table, ragged_in
from workbench.batches.turns import marked
from workbench.conversations.answers import Answers
from workbench.conversations.credit import Credit, Fork, Value, pictures
from workbench.conversations.rows import (
    STAGE,
    Continuations,
    add_branch,
    as_answer,
    as_turn,
    branch_table,
    lists,
    row_table,
)
from workbench.conversations.tree import Tree, Turn
from workbench.data.conversation_turns import Resumed
from workbench.display.conversation import TurnPicture, tree_picture
from workbench.errors import BadInput, RolloutError
from workbench.messages.metrics import MetricValues
from workbench.settings.engines import Sampling
from workbench.support.checked_calls import checks_calls
from workbench.support.seeds import derive_seed
from workbench.support.validation import NonNegativeInt, PositiveInt

CONTINUED = ("gae", "gae_turn")  # estimators that take the critic's value for what would come after a branch


class Talk:
    """The environment of a conversation that has none: it waits for `chat.say`."""

    def step(self, response: str) -> tuple[None, float, bool]:
        return None, 0.0, False


@checks_calls("chat")
class Chat:
    """A conversation of the policy with an environment, as a tree of turns. Made by `lab.conversation`.

    step(): the policy takes a turn, and the environment answers. say(): you answer it, and the policy takes the next
    turn. finish(): until the conversation has ended, or waits for you. edit(): another text for a turn, or for an
    answer. fork(): continuations from a turn, and its value by Monte Carlo. go(): to another branch. batch(), train():
    branches as rows. values(): credit by turn. tree: all turns; here: the number of the turn that the next one comes
    behind, None at the beginning; path: the turns up to it.

    Turns are drawn by the actor's newest weights, one after the other, so branches may be of several versions. The
    environment runs in a process of its own; at a branch a new one is told the turns before it again, see `Answers`.
    Training sees nothing of all this but by `train`.
    """

    def __init__(self, lab: Lab, row: Any, *, sampling: Sampling, gamma: float, seed: int) -> None:
        self._lab = lab
        self._sampling = replace(sampling, keep_mask=False, retries=0, most_failed=1.0, max_seconds=None, context=None)
        self._tokenizer = lab.runner.batches.tokenizer
        generation = lab.description.generation
        assert generation is not None
        self._most = generation.max_model_tokens
        self._row = row_table(lab, row)
        self._continuations, self._credit = Continuations(lab, self._row, seed), Credit(gamma)
        texts = {name: column[0] for name, column in self._row.items() if isinstance(column, list)}
        self._sample_seed = derive_seed("conversation", seed)
        self._answers = Answers(
            self._sampling, {**texts, "sample_seed": self._sample_seed}, self._tokenizer, self._most
        )
        first = self._answers.beginning()
        own = ragged_in(self._row, "prompt_ids").values.tolist()
        prompt_ids = own if first.prompt_ids is None else first.prompt_ids
        self.tree = Tree(
            prompt_ids=prompt_ids, first_ids=first.observation_ids, decode=lab.runner.batches.decode
        )  # fmt: skip
        self.here: int | None = None
        self.changes = 0  # counts up with each, for views

    # --- where it stands ----------------------------------------------------------------------------------------------

    @property
    def path(self) -> list[Turn]:
        """The turns of the branch, in order."""
        return self.tree.path(self.here)

    @property
    def ended(self) -> str:
        """Why the branch does not go on, as in the column `ending`: "done", "max_turns", "max_tokens", "max_calls"; ""
        where it does. By hand there is no limit of seconds."""
        return self._ended(self.path)

    def _ended(self, path: Sequence[Turn]) -> str:
        if path and path[-1].done:
            return "done"
        if len(path) >= self._sampling.max_turns:
            return "max_turns"
        if path and not path[-1].answered:
            return path[-1].limit or "max_tokens"
        return "max_tokens" if self._room(path) < 1 else ""

    def _room(self, path: Sequence[Turn]) -> int:
        """Tokens that a turn behind these may have."""
        used = len(self.tree.tokens(path))
        return min(self._most - len(self.tree.prompt_ids), self._sampling.max_new_tokens) - used

    def _waits(self, path: Sequence[Turn]) -> bool:
        """Whether you are to answer the last turn, as there is no environment that does."""
        return self._sampling.environment is Talk and bool(path) and path[-1].answered_by != "hand"

    def _need_open(self, path: Sequence[Turn]) -> None:
        if why := self._ended(path):
            reasons = {
                "done": "the environment said that it is over",
                "max_turns": f"it has all of max_turns={self._sampling.max_turns}",
                "max_calls": f"its tool calls are more than max_calls={self._sampling.max_calls}",
                "max_tokens": "there is no room for another token: raise max_new_tokens or Generation.max_model_tokens",
            }
            raise BadInput(
                f"another turn behind turn {len(path) - 1}", reasons[why], "go to an earlier turn: chat.go(...)"
            )
        if self._waits(path):
            rule = "nobody has answered the last one: the policy would talk to itself"
            raise BadInput(f"another turn behind turn {len(path) - 1}", rule, "chat.say('...') answers it")

    def go(self, turn: Any) -> Chat:
        """Go to a turn of the tree, by itself or by number, so that the next one comes behind it; None: to the
        beginning. Returns the chat."""
        self.here = None if turn is None else self.tree.number(turn)
        self.changes += 1
        return self

    # --- turns --------------------------------------------------------------------------------------------------------

    def step(self) -> Turn:
        """Let the policy take a turn, and the environment answer. Returns the turn; the chat shows it.

        Raises `BadInput` where the branch has ended, `RolloutError` where the environment fails: nothing is added then.
        """
        path = self.path
        self._need_open(path)
        sampling = replace(self._sampling, environment=None, max_new_tokens=self._room(path))
        table, _, version = self._continuations.draw(self.tree, path, 1, sampling)
        ids, log_probs = (lists(table, name)[0] for name in ("response_ids", "rollout_log_prob"))
        ending = table["ending"][0]  # type: ignore[index]
        return self._add(path, ids, log_probs, str(ending), "policy", version)

    def finish(self) -> Chat:
        """Take turns until the branch has ended, or waits for you. Returns the chat."""
        while not (self.ended or self._waits(self.path)):
            self.step()
        return self

    def say(self, text: str) -> Turn:
        """Say something as the user, in place of what the environment answered to the last turn, and let the policy
        take the next turn. `batch(before_edits=True)` makes a row of what was said."""
        if not self.path:
            raise BadInput("say() before the first turn", "the prompt is what was said first", "chat.step()")
        self.edit(len(self.path) - 1, answer=[{"role": "user", "content": text}])
        return self.step()

    def edit(self, turn: NonNegativeInt, text: str | None = None, *, answer: Any = None) -> Turn:
        """Replace a turn of the branch, or what it was answered, and go there: what came behind stays in the tree, as
        another branch.

        turn: its place in the branch, from 0. text: of the policy, in place of the turn's; the token that ends a turn
        is added unless the text ends with one of the stop strings. The environment answers it. answer: what the policy
        reads in place of the environment's answer: a text, or messages, in which control tokens are text. The
        environment does not know of it.
        """
        path = self.path
        if turn >= len(path):
            raise BadInput(f"edit({turn})", f"the branch has {len(path)} turns, from 0", "chat.step() takes another")
        if text is None and answer is None:
            raise BadInput(f"edit({turn})", "gives another text for the turn, or another answer", "edit(0, 'text')")
        before, new = path[:turn], path[turn]
        if text is not None:
            ids, ending = as_turn(self._tokenizer, text, stop=self._sampling.stop, room=self._room(before))
            new = self._add(before, ids, [0.0] * len(ids), ending, "hand", new.weights_version)
        if answer is None:
            return new
        if new.done or not new.answered:
            raise BadInput(f"an answer to turn {turn}", "the conversation ended with it: nobody reads an answer")
        ids = as_answer(self._tokenizer, answer, new)
        edited = replace(new, number=len(self.tree.turns), answer_ids=ids, answered_by="hand")
        return self._added(edited)

    def _add(
        self, path: Sequence[Turn], ids: Sequence[int], log_probs: Sequence[float], ending: str, by: Any, version: int
    ) -> Turn:
        """A turn behind a path, with what the environment answers."""
        parent = path[-1].number if path else None
        told: dict[str, Any] = {"answered": False}
        if ending != "length":
            reply = self._answers.answer(self.tree, path, ids)
            own = reply.observation_ids
            told = {"answer_ids": own, "own_ids": own, "reward": reply.reward, "done": reply.done}
            if reply.limit is not None:
                told |= {"answered": False, "limit": reply.limit}
        turn = Turn(
            number=len(self.tree.turns), parent=parent, token_ids=list(ids), log_probs=list(log_probs), ending=ending,
            written_by=by, weights_version=version, **told,
        )  # fmt: skip
        if self._ended([*path, turn]):
            turn = self._scored([[*path, turn]])[0]
        return self._added(turn)

    def _added(self, turn: Turn) -> Turn:
        added = self.tree.add(turn)
        self.here = added.number
        self.changes += 1
        return added

    def _scored(self, paths: Sequence[Sequence[Turn]]) -> dict[int, Turn]:
        """The last turns of branches that have ended, by their place in `paths`, with the rewards that bring the sum of
        each branch to what the workbench's reward function gives; without one the environment's. Branches for which it
        failed are left out; `RewardError` where it failed for all."""
        last = {i: path[-1] for i, path in enumerate(paths)}
        if "reward" not in self._lab.groups:
            return last
        ranks = self._continuations.ranks("reward")
        with self._lab.runner.isolated(STAGE):
            batch = self._put(paths, before_edits=True, trains=False).repeat(ranks)
            try:
                scored = self._lab.reward.compute_reward(batch, most_failed=1 - 1 / len(paths))
            except BadInput as problem:  # it takes a column that the row lacks
                warnings.warn(f"{problem} The environment's rewards stand alone.", RuntimeWarning, stacklevel=2)
                return last
            given, failed = scored.fetch(["rewards"])["rewards"], {row // ranks for row in scored.failed()["row"]}
        totals = [float(row.sum()) for row in (given.rows() if isinstance(given, Ragged) else given)][::ranks]
        before = [sum(turn.reward for turn in path[:-1]) for path in paths]
        return {i: replace(turn, reward=totals[i] - before[i]) for i, turn in last.items() if i not in failed}

    # --- values -------------------------------------------------------------------------------------------------------

    def fork(self, n: PositiveInt, at: NonNegativeInt | None = None) -> Fork:
        """Sample n continuations from before a turn of the branch, to their ends: their returns, and with them the
        value of the conversation there, beside the critic's where there is one.

        at: a place in the branch, from 0: that turn, and all behind it, are drawn anew; None: behind the last turn. The
        turns come into the tree, beside what is there; `here` stays. Further forks at the same place add to its value
        as long as the weights are the same. An environment that draws from `sample_seed` draws the same in all.
        """
        before = self._before(at, f"fork(at={at})")
        place = len(before)
        self._need_open(before)
        assert self._sampling.environment is not None
        said, most = self._answers.said(self.tree, before), self._sampling.max_calls
        made = sum(len(turn.more.get("message", {}).get("tool_calls", ())) for turn in said)
        resumed = Resumed(
            make=self._sampling.environment, sample_seed=self._sample_seed, said=said, began=self._answers.began
        )
        sampling = replace(
            self._sampling,
            environment=resumed,
            max_calls=None if most is None else max(0, most - made),
            max_turns=1 if self._sampling.environment is Talk else self._sampling.max_turns - place,
            max_new_tokens=self._room(before),
        )
        has_critic = "critic" in self._lab.groups
        table, critic, version = self._continuations.draw(self.tree, before, n, sampling, values=has_critic)
        return self._forked(before, table, critic, version)

    def _forked(self, before: Sequence[Turn], table: Table, critic: float | None, version: int) -> Fork:
        parent = before[-1].number if before else None
        columns = {name: lists(table, name) for name in ("response_ids", "response_mask", "turn_rewards")}
        kept = [i for i in range(len(columns["turn_rewards"])) if int(table["valid"][i])]  # type: ignore[index]
        if not kept:
            raise RolloutError("the environment failed in every continuation", str(table["failure"][0])[:300])  # type: ignore[index]
        paths = [self.tree.path(add_branch(self.tree, parent, table, i, version).number) for i in kept]
        scored, returns = self._scored(paths), list[float]()
        for i, leaf in scored.items():
            self.tree.turns[leaf.number] = leaf
            rewards = [turn.reward for turn in [*paths[i][len(before) : -1], leaf]]
            returns.append(sum(self._credit.gamma**k * reward for k, reward in enumerate(rewards)))
        kept, leaves = [kept[i] for i in scored], list(scored.values())
        self._credit.add(parent, version, returns)
        self.changes += 1
        endings = [str(table["ending"][i]) for i in kept]  # type: ignore[index]
        ids, masks = columns["response_ids"], columns["response_mask"]
        return Fork(
            at=len(before), leaves=leaves, returns=returns, endings=endings, critic=critic,
            texts=[marked(ids[i], masks[i], self._lab.runner.batches.decode) for i in kept],
            turns=[len(columns["turn_rewards"][i]) for i in kept], failed=len(columns["turn_rewards"]) - len(leaves),
        )  # fmt: skip

    def value(self, turn: NonNegativeInt | None = None) -> Value | None:
        """The value before a turn of the branch by the continuations that were forked there; None: there are none.
        turn: its place, from 0; None: behind the last one."""
        before = self._before(turn, f"value({turn})")
        return self._credit.value_behind(before[-1].number if before else None)

    def _before(self, place: int | None, called: str) -> list[Turn]:
        """The turns of the branch before a place in it; None: all of them."""
        path = self.path
        if place is not None and place > len(path):
            raise BadInput(called, f"the branch has {len(path)} turns: a place from 0 to {len(path)}")
        return path[:place]

    def advantage(self, turn: Any) -> float | None:
        """What a turn of the tree gained, by continuations: its reward, and gamma times the value behind it, less the
        value before it. None where there are no continuations from both places; behind the end the value is 0."""
        return self._credit.advantage(self.tree.turns[self.tree.number(turn)])

    def values(self) -> pd.DataFrame:
        """Credit by turn, of the branch: one row a turn, with `turn`, `number` (in the tree), `text`, `answer`,
        `written_by`, `answered_by`, `reward`; `value`, `value_low`, `value_high`, `forked`: by continuations from
        before the turn, with the ends of a 95 % interval (NaN where there are none); with a critic `critic_value`."""
        path = self.path
        critic = self._critic_values(path) if path and "critic" in self._lab.groups else None
        lines = []
        for k, turn in enumerate(path):
            value = self.value(k)
            lines.append(
                {
                    "turn": k, "number": turn.number, "text": turn.text, "answer": turn.answer,
                    "written_by": turn.written_by, "answered_by": turn.answered_by, "reward": turn.reward,
                    "value": value.mean if value else float("nan"), "value_low": value.low if value else float("nan"),
                    "value_high": value.high if value else float("nan"), "forked": value.n if value else 0,
                    **({} if critic is None else {"critic_value": critic[k]}),
                }
            )  # fmt: skip
        return pd.DataFrame(lines)

    def _critic_values(self, path: Sequence[Turn]) -> list[float]:
        with self._lab.runner.isolated(STAGE):
            batch = self._put([path], before_edits=True, trains=False)
            batch = self._lab.critic.compute_values(batch.repeat(self._continuations.ranks("critic")))
            return list(batch.turns(rows=[0]).value)

    # --- batches ------------------------------------------------------------------------------------------------------

    def batch(self, *turns: Any, before_edits: bool = False) -> Batch:
        """Branches as a batch: the columns of `generate_sequences(environment=...)`, one row for each turn that is
        given (by itself or by number) with all before it; none given: the branch.

        `response_mask` is 1 on tokens that the policy sampled. It is 0 on what was written by hand, on turns before
        that (whose returns a hand was in, unless before_edits), and on turns that several rows share.
        Raises `BadInput` where no token is left to train.
        """
        return self._put(self._paths(turns), before_edits=before_edits)

    def _paths(self, turns: Sequence[Any]) -> list[list[Turn]]:
        return [self.tree.path(self.tree.number(turn)) for turn in turns] if turns else [self.path]

    def _put(self, paths: Sequence[Sequence[Turn]], *, before_edits: bool, trains: bool = True) -> Batch:
        if not all(paths):
            raise BadInput("a branch without a turn", "a row has one turn at least", "chat.step()")
        table = branch_table(
            self.tree, paths, [self._ended(path) or "max_turns" for path in paths], before_edits=before_edits
        )
        if trains and not ragged_in(table, "response_mask").values.any():
            raise BadInput(
                "a batch without a token to train",
                "turns that were written by hand, those before them, and those that all rows share are not trained",
                "step on from there, or batch(before_edits=True)",
            )
        texts = {name: column * len(paths) for name, column in self._row.items() if isinstance(column, list)}
        uids = {"prompt_uid": torch.as_tensor(self._row["prompt_uid"]).repeat(len(paths))}
        versions = [turn.weights_version for path in paths for turn in path]
        meta = {**self._continuations.meta, "weights_version": min(versions)} if self._continuations.meta else {}
        return self._lab.put({**texts, **uids, **table}, meta=meta, owner="conversation")

    def train(
        self, *turns: Any, estimator: str | Callable[..., Any] | None = None, before_edits: bool = False, **update: Any
    ) -> MetricValues:
        """Take an optimizer step of the actor on branches, see `batch`, by the rewards of their turns. Returns the
        update's metrics.

        With a critic, and "gae_turn" or "gae", its value behind the last turn stands for what would come after a branch
        that is not over. Other estimators need the whole return: raises `BadInput` for a branch that goes on.

        estimator: of `compute_advantages`; None: with a critic "gae_turn"; without one "reinforce_turn_baseline" over
        several branches, "reinforce_turn" of one. They are not whitened. update: arguments of `update_actor`, such as
        `loss` and `clip`. A batch has as many rows at least as minibatches and ranks: fork, and give the leaves.
        """
        lab, paths = self._lab, self._paths(turns)
        has_critic = "critic" in lab.groups
        several = "reinforce_turn_baseline" if len(paths) > 1 else "reinforce_turn"
        estimator = estimator or ("gae_turn" if has_critic else several)
        goes_on = has_critic and estimator in CONTINUED
        if not goes_on:
            self._need_ended(paths, estimator)
        batch = self._put(paths, before_edits=before_edits).rename(environment_rewards="rewards")
        batch = lab.actor.compute_log_prob(batch)
        if has_critic:
            batch = lab.critic.compute_values(batch, final=goes_on)
        batch = lab.compute_advantages(
            batch, estimator=estimator, gamma=self._credit.gamma, bootstrap=goes_on, whiten_advantages=False
        )
        metrics: MetricValues = lab.actor.update_actor(batch, **update)
        self.changes += 1
        return metrics

    def _need_ended(self, paths: Sequence[Sequence[Turn]], estimator: Any) -> None:
        for path in paths:
            if path and not self._ended(path):
                named = estimator if isinstance(estimator, str) else getattr(estimator, "__name__", "the estimator")
                raise BadInput(
                    f"train on the branch that ends with turn {path[-1].number}, which goes on",
                    f"{named} takes its return as whole, and what would come after it as nothing",
                    'chat.finish() first; or open the lab with a critic, for estimator="gae_turn"',
                )

    def close(self) -> None:
        """End the environment's process. The tree stays, and the next turn starts one again."""
        self._answers.close()

    # --- shown --------------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        ended = f", ended: {self.ended}" if self.ended else ""
        return f"<Chat: {len(self.path)} turns here, {len(self.tree.turns)} in the tree{ended}>"

    def _repr_html_(self) -> str:
        return tree_picture(self.pictures(), repr(self)[1:-1])

    def pictures(self) -> list[TurnPicture]:
        """All turns as they are drawn, each before those that go on from it."""
        return pictures(self.tree, self.path, self._credit)
