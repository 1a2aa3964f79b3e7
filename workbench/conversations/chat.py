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
from workbench.conversations.credit import Credit, Fork, Value
from workbench.conversations.rows import (
    STAGE,
    Continuations,
    add_branch,
    as_answer,
    as_turn,
    branch_table,
    lists,
    row_table,
    trained_turns,
)
from workbench.conversations.tree import Tree, Turn
from workbench.data.conversation_turns import Resumed
from workbench.display.conversation import TurnPicture, tree_picture
from workbench.errors import BadInput, RolloutError
from workbench.messages.metrics import MetricValues
from workbench.settings.engines import Sampling
from workbench.support.calls.limits import limits
from workbench.support.checked_calls import checks_calls
from workbench.support.seeds import derive_seed
from workbench.support.validation import NonNegativeInt, PositiveInt

CONTINUED = ("gae", "gae_turn")  # estimators that use the critic's value in place of the return after a branch


@limits(own_process=False)
class NoEnvironment:
    """The environment of a conversation without an environment: it never answers, and the user does by `chat.say`."""

    def step(self, response: str) -> tuple[None, float, bool]:
        return None, 0.0, False


@checks_calls("chat")
class Chat:
    """A conversation of the policy with an environment, as a tree of turns. Made by `lab.conversation`.

    step(): the policy takes a turn, and the environment answers. say(): you answer a turn, and the policy takes the
    next. finish(): take turns until the conversation has ended, or waits for you. edit(): replace a turn's text, or its
    answer. fork(): sample continuations from a turn, and estimate its value by Monte Carlo. go(): move to another
    branch. batch(), train(): branches as rows. values(): credit by turn. tree: all turns. here: the number of the
    current turn, which the next turn follows; None at the beginning. path: the turns up to it.

    Each turn is sampled with the actor's newest weights, so a branch may mix weights versions. The environment runs in
    a process of its own; for a new branch the earlier turns are replayed to a new environment, see `Answers`. The
    conversation affects training only through `train`.
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
        lab.before_close(self._answers.close)
        first = self._answers.beginning()
        own = ragged_in(self._row, "prompt_ids").values.tolist()
        prompt_ids = own if first.prompt_ids is None else first.prompt_ids
        self.tree = Tree(
            prompt_ids=prompt_ids, first_ids=first.observation_ids, decode=lab.runner.batches.decode
        )  # fmt: skip
        self.here: int | None = None
        self.changes = 0  # the number of changes so far, by which views notice a change

    # --- where it stands ----------------------------------------------------------------------------------------------

    @property
    def path(self) -> list[Turn]:
        """The turns of the current branch, in order."""
        return self.tree.path(self.here)

    @property
    def ended(self) -> str:
        """Why the branch has ended, as in the column `ending`: "done", "max_turns", "max_tokens", "max_calls"; "" while
        it can continue. A conversation by hand has no limit of seconds."""
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
        used = len(self.tree.tokens(path))
        return min(self._most - len(self.tree.prompt_ids), self._sampling.max_new_tokens) - used

    def _waits(self, path: Sequence[Turn]) -> bool:
        """Whether the user has to answer the last turn, because there is no environment."""
        return self._sampling.environment is NoEnvironment and bool(path) and path[-1].answered_by != "hand"

    def _need_open(self, path: Sequence[Turn]) -> None:
        if why := self._ended(path):
            reasons = {
                "done": "the environment has ended the conversation",
                "max_turns": f"it has max_turns={self._sampling.max_turns} turns already",
                "max_calls": f"it has made more than max_calls={self._sampling.max_calls} tool calls",
                "max_tokens": "there is no room for another token: raise max_new_tokens or Generation.max_model_tokens",
            }
            raise BadInput(
                f"another turn after turn {len(path) - 1}", reasons[why], "go to an earlier turn: chat.go(...)"
            )
        if self._waits(path):
            rule = "the last turn has no answer yet, and the policy does not answer itself"
            raise BadInput(f"another turn after turn {len(path) - 1}", rule, "answer it: chat.say('...')")

    def go(self, turn: Any) -> Chat:
        """Go to a turn of the tree, so that the next turn follows it. turn: a `Turn`, or its number; None: go to the
        beginning. Returns the chat."""
        self.here = None if turn is None else self.tree.number(turn)
        self.changes += 1
        return self

    # --- turns --------------------------------------------------------------------------------------------------------

    def step(self) -> Turn:
        """Let the policy take a turn, and the environment answer. Returns the turn; the chat shows it.

        Raises `BadInput` if the branch has ended, `RolloutError` if the environment fails; then no turn is added.
        """
        path = self.path
        self._need_open(path)
        sampling = replace(self._sampling, environment=None, max_new_tokens=self._room(path))
        table, _, version = self._continuations.draw(self.tree, path, 1, sampling)
        ids, log_probs = (lists(table, name)[0] for name in ("response_ids", "rollout_log_prob"))
        ending = table["ending"][0]  # type: ignore[index]
        return self._add(path, ids, log_probs, str(ending), "policy", version)

    def finish(self) -> Chat:
        """Take turns until the branch has ended, or waits for the user. Returns the chat."""
        while not (self.ended or self._waits(self.path)):
            self.step()
        return self

    def say(self, text: str) -> Turn:
        """Answer the last turn as the user, in place of the environment, and let the policy take the next turn. With
        `batch(before_edits=True)` the turns before the answer are trained as well."""
        if not self.path:
            raise BadInput("say() before the first turn", "the policy must first answer the prompt", "call chat.step()")
        self.edit(len(self.path) - 1, answer=[{"role": "user", "content": text}])
        return self.step()

    def edit(self, turn: NonNegativeInt, text: str | None = None, *, answer: Any = None) -> Turn:
        """Replace a turn of the branch, or its answer, and go there. The old turn and the turns after it stay in the
        tree, as another branch.

        turn: its position in the branch, from 0. text: replaces the policy's text; the token that ends a turn is added
        unless the text ends with a stop string. The environment answers the new text. answer: replaces the
        environment's answer: a text, or messages, in which control tokens are read as text. The environment is not told
        about it.
        """
        path = self.path
        if turn >= len(path):
            raise BadInput(f"edit({turn})", f"the branch has {len(path)} turns, from 0", "chat.step() adds one")
        if text is None and answer is None:
            raise BadInput(f"edit({turn})", "needs another text for the turn, or another answer", "edit(0, 'text')")
        before, new = path[:turn], path[turn]
        if text is not None:
            ids, ending = as_turn(self._tokenizer, text, stop=self._sampling.stop, room=self._room(before))
            new = self._add(before, ids, [0.0] * len(ids), ending, "hand", new.weights_version)
        if answer is None:
            return new
        if new.done or not new.answered:
            raise BadInput(f"an answer to turn {turn}", "the conversation ended with this turn")
        ids = as_answer(self._tokenizer, answer, new)
        return self._added(replace(new, number=len(self.tree.turns), answer_ids=ids, answered_by="hand"))

    def _add(
        self, path: Sequence[Turn], ids: Sequence[int], log_probs: Sequence[float], ending: str, by: Any, version: int
    ) -> Turn:
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
        """Return the last turns of ended branches, by their position in `paths`. Their rewards are set so that each
        branch's sum equals the score of the workbench's reward role; without that role they keep the environment's.
        Leaves out branches for which scoring failed; raises `RewardError` if it failed for all."""
        last = {i: path[-1] for i, path in enumerate(paths)}
        if "reward" not in self._lab.groups:
            return last
        ranks = self._continuations.ranks("reward")
        with self._lab.runner.isolated(STAGE):
            batch = self._put(paths, before_edits=True, trains=False).repeat(ranks)
            try:
                scored = self._lab.reward.compute_reward(batch, most_failed=1 - 1 / len(paths))
            except BadInput as problem:  # the reward function reads a column that the row lacks
                warnings.warn(f"{problem} Only the environment's rewards are used.", RuntimeWarning, stacklevel=2)
                return last
            given, failed = scored.fetch(["rewards"])["rewards"], {row // ranks for row in scored.failed()["row"]}
        totals = [float(row.sum()) for row in (given.rows() if isinstance(given, Ragged) else given)][::ranks]
        before = [sum(turn.reward for turn in path[:-1]) for path in paths]
        return {i: replace(turn, reward=totals[i] - before[i]) for i, turn in last.items() if i not in failed}

    # --- values -------------------------------------------------------------------------------------------------------

    def fork(self, n: PositiveInt, at: NonNegativeInt | None = None) -> Fork:
        """Sample n continuations from before a turn of the branch, until they end. Returns their returns, which give
        the value of the conversation there, and the critic's value if there is a critic.

        at: a position in the branch, from 0: this turn and all later turns are sampled anew; None: continue after the
        last turn. The new turns are added to the tree; `here` stays. Further forks at the same position add to its
        value while the weights stay the same. `sample_seed` is the same for the environments of all continuations.
        """
        before = self._before(at, f"fork(at={at})")
        place = len(before)
        self._need_open(before)
        assert self._sampling.environment is not None
        turns, most = self._answers.replayed_turns(self.tree, before), self._sampling.max_calls
        made = sum(len(turn.more.get("message", {}).get("tool_calls", ())) for turn in turns)
        resumed = Resumed(
            make=self._sampling.environment, sample_seed=self._sample_seed, turns=turns, began=self._answers.began
        )
        sampling = replace(
            self._sampling,
            environment=resumed,
            max_calls=None if most is None else max(0, most - made),
            max_turns=1 if self._sampling.environment is NoEnvironment else self._sampling.max_turns - place,
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
        """Return the value before a turn of the branch, from the continuations that were forked there; None without
        continuations. turn: its position, from 0; None: the value after the last turn."""
        before = self._before(turn, f"value({turn})")
        return self._credit.value_behind(before[-1].number if before else None)

    def _before(self, place: int | None, called: str) -> list[Turn]:
        """Return the turns of the branch before a position in it (None: all). called: the call, for the message."""
        path = self.path
        if place is not None and place > len(path):
            raise BadInput(called, f"the branch has {len(path)} turns: give 0 to {len(path)}")
        return path[:place]

    def advantage(self, turn: Any) -> float | None:
        """Return the advantage of a turn of the tree, from continuations: its reward, plus gamma times the value after
        it, minus the value before it. After the end the value is 0. None without continuations from both places."""
        return self._credit.advantage(self.tree.turns[self.tree.number(turn)])

    def values(self) -> pd.DataFrame:
        """Return the credit of each turn of the branch, one row per turn: `turn`, `number` (in the tree), `text`,
        `answer`, `written_by`, `answered_by`, `reward`; `value`, `value_low`, `value_high`, from `forked` continuations
        before the turn, with the ends of a 95 % interval (NaN without); with a critic `critic_value`."""
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
        """Return branches as a batch with the columns of `generate_sequences(environment=...)`. turns: the last turn of
        each row's branch, as a `Turn` or its number; without turns, the current branch is the only row.

        `response_mask` is 1 on tokens that the policy sampled. It is 0 on tokens written by hand, on turns before them
        (because the edit affected their returns; before_edits=True keeps these at 1), and on turns that several rows
        share. Raises `BadInput` if no token is left to train.
        """
        return self._put(self._paths(turns), before_edits=before_edits)

    def _paths(self, turns: Sequence[Any]) -> list[list[Turn]]:
        return [self.tree.path(self.tree.number(turn)) for turn in turns] if turns else [self.path]

    def _put(self, paths: Sequence[Sequence[Turn]], *, before_edits: bool, trains: bool = True) -> Batch:
        if not all(paths):
            raise BadInput("a branch without a turn", "a row needs at least one turn", "call chat.step()")
        table = branch_table(
            self.tree, paths, [self._ended(path) or "max_turns" for path in paths], before_edits=before_edits
        )
        if trains and not ragged_in(table, "response_mask").values.any():
            raise BadInput(
                "a batch without a token to train",
                "turns written by hand, turns before them, and turns that all rows share are not trained",
                "continue with chat.step(), or use batch(before_edits=True)",
            )
        texts = {name: column * len(paths) for name, column in self._row.items() if isinstance(column, list)}
        uids = {"prompt_uid": torch.as_tensor(self._row["prompt_uid"]).repeat(len(paths))}
        versions = [turn.weights_version for path in paths for turn in path]
        meta = {**self._continuations.meta, "weights_version": min(versions)} if self._continuations.meta else {}
        return self._lab.put({**texts, **uids, **table}, meta=meta, owner="conversation")

    def train(
        self, *turns: Any, estimator: str | Callable[..., Any] | None = None, before_edits: bool = False, **update: Any
    ) -> MetricValues:
        """Update the actor on branches, see `batch`, with the rewards of their turns. Returns the update's metrics.

        With a critic, and "gae_turn" or "gae", the critic's value after the last turn replaces the return of a branch
        that has not ended. Other estimators need the whole return, and raise `BadInput` for such a branch.

        estimator: for `compute_advantages`; None: "gae_turn" with a critic; without, "reinforce_turn_baseline" for
        several branches, "reinforce_turn" for one. Advantages are not whitened. update: arguments of `update_actor`,
        such as `loss` and `clip`. A batch needs at least as many rows as minibatches and ranks: fork, and pass the
        leaves.
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
                    f"train on the branch that ends with turn {path[-1].number}, which has not ended",
                    f"{named} needs the whole return, and would count missing turns as 0",
                    'call chat.finish() first, or open a workbench with a critic, for estimator="gae_turn"',
                )

    def close(self) -> None:
        """End the environments' process. The tree stays, and the next turn starts a new process. Raises `BadInput`
        while another thread waits for an answer."""
        if not self._answers.close_unless_busy():
            raise BadInput("close() while the environment answers a turn", "the turn would be lost", "wait for it")

    # --- shown --------------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        ended = f", ended: {self.ended}" if self.ended else ""
        return f"<Chat: {len(self.path)} turns here, {len(self.tree.turns)} in the tree{ended}>"

    def _repr_html_(self) -> str:
        return tree_picture(self.pictures(), repr(self)[1:-1])

    def pictures(self) -> list[TurnPicture]:
        """Return all turns in the form for display, each before the turns that continue it."""
        tree, path, found = self.tree, self.path, list[TurnPicture]()
        trained = dict(zip([turn.number for turn in path], trained_turns([path], before_edits=False)[0], strict=True))
        indents: dict[int | None, int] = {None: 0}
        for turn in tree.walk():
            indents[turn.number] = indents[turn.parent] + (len(tree.children(turn.parent)) > 1)
            value, advantage = self._credit.value_behind(turn.number), self._credit.advantage(turn)
            found.append(
                TurnPicture(
                    number=turn.number, indent=indents[turn.number], text=turn.text, answer=turn.answer,
                    by_hand=turn.written_by == "hand", answered_by_hand=turn.answered_by == "hand", reward=turn.reward,
                    done=turn.done, ending=turn.ending, advantage=advantage, value=str(value) if value else "",
                    on_path=turn.number in trained, here=turn.number == self.here,
                    trained=trained.get(turn.number, False), tokens=len(turn.token_ids),
                )
            )  # fmt: skip
        return found
