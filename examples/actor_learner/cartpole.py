"""Actors that are no workers, and a learner that says how old their experience may be, on CartPole.

python examples/actor_learner/cartpole.py --lag 4                 # one run: 4 actors, a learner
python examples/actor_learner/cartpole.py --table --out lag.json  # reward against the bound

Each actor takes the newest version of the policy, plays 64 steps with it, and puts them into a queue with the
version's number. The learner leaves out what is more than --lag versions old, takes a step of an actor-critic (no
correction for age), and publishes. It keeps what it was offered, and at the end learns from it once more, without
actors: the same segments are accepted, and the weights come out the same, bit by bit.
"""

import argparse
import json
import multiprocessing
import os
import platform
import queue
import statistics
from dataclasses import dataclass

import gymnasium
import numpy as np

import multiverso as mv

ACTORS, STEPS, HIDDEN, GAMMA, RATE, ENTROPY = 4, 64, 64, 0.99, 3e-3, 0.01
QUEUED = 64  # segments that may wait: what they are late by
DEADLINE_SECONDS = 120.0


@dataclass(frozen=True)
class Segment:
    """What an actor did with one version: observations (steps + 1, 4), actions and ends of games (steps,)."""

    version: int
    observations: np.ndarray
    actions: np.ndarray
    ended: np.ndarray


# -- actors ------------------------------------------------------------------------------------------------------------


def act(name, seed, segments):
    """Plays with whatever version is the newest, until it is terminated."""
    random = np.random.default_rng(seed)
    game, state = begin(random)
    with mv.subscribe(name, timeout_seconds=DEADLINE_SECONDS) as subscription:
        while True:
            with subscription.latest() as policy:
                version, weights = policy.version, dict(policy)  # the shared memory itself: nothing is copied
                observations, actions, ended = [state], [], []
                for _ in range(STEPS):
                    actions.append(choose(weights, state, random))
                    state, _, fell, late, _ = game.step(actions[-1])
                    ended.append(fell or late)
                    if ended[-1]:
                        state, _ = game.reset()
                    observations.append(state)
                del weights
            segments.put(Segment(version, np.array(observations), np.array(actions), np.array(ended)))


def begin(random):
    """Returns a game and its first state."""
    game = gymnasium.make("CartPole-v1")
    return game, game.reset(seed=int(random.integers(2**31)))[0]


def outputs(weights, states):
    """Returns the hidden layer and, for each state, what speaks for left and right, and the state's value."""
    hidden = np.tanh(states @ weights["w1"] + weights["b1"])
    return hidden, hidden @ weights["w2"] + weights["b2"]


def choose(weights, state, random):
    """Draws an action."""
    _, (left, right, _) = outputs(weights, state)
    return int(random.random() < 1 / (1 + np.exp(left - right)))


def reward(weights, games, seed):
    """Returns the mean length of games, 500 at most."""
    random = np.random.default_rng([seed, 1])
    game, state = begin(random)
    steps, over = 0, 0
    while over < games:
        state, _, fell, late, _ = game.step(choose(weights, state, random))
        steps += 1
        if fell or late:
            over += 1
            state, _ = game.reset()
    return steps / games


# -- the learner -------------------------------------------------------------------------------------------------------


class Learner:
    """A policy and Adam's moments of it."""

    def __init__(self, seed):
        random = np.random.default_rng(seed)
        self.weights = {
            "w1": random.normal(0, 0.5, (4, HIDDEN)),
            "b1": np.zeros(HIDDEN),
            "w2": random.normal(0, 0.05, (HIDDEN, 3)),
            "b2": np.zeros(3),
        }
        self.moments = {name: (np.zeros_like(value), np.zeros_like(value)) for name, value in self.weights.items()}
        self.steps = 0

    def learn(self, segment):
        """One step of an advantage actor-critic."""
        hidden, out = outputs(self.weights, segment.observations)
        hidden, values = hidden[:-1], out[:, 2]
        chances = np.exp(out[:-1, :2] - out[:-1, :2].max(1, keepdims=True))
        chances /= chances.sum(1, keepdims=True)
        returns, after = np.empty(len(hidden)), values[-1]
        for step in reversed(range(len(hidden))):
            after = returns[step] = 1 - GAMMA + GAMMA * after * (not segment.ended[step])
        advantages = returns - values[:-1]
        scaled = (advantages - advantages.mean()) / (advantages.std() + 1e-6)
        logs = np.log(chances + 1e-12)
        entropy = -(chances * logs).sum(1, keepdims=True)
        slopes = np.empty((len(hidden), 3))
        slopes[:, :2] = (chances - np.eye(2)[segment.actions]) * scaled[:, None] + ENTROPY * chances * (logs + entropy)
        slopes[:, 2] = -advantages
        slopes /= len(hidden)
        inner = slopes @ self.weights["w2"].T * (1 - hidden**2)
        self._descend({
            "w1": segment.observations[:-1].T @ inner, "b1": inner.sum(0), "w2": hidden.T @ slopes, "b2": slopes.sum(0),
        })  # fmt: skip

    def _descend(self, slopes):
        self.steps += 1
        for name, slope in slopes.items():
            first, second = self.moments[name]
            first += 0.1 * (slope - first)
            second += 0.001 * (slope**2 - second)
            unbiased = second / (1 - 0.999**self.steps)
            self.weights[name] -= RATE * first / (1 - 0.9**self.steps) / (np.sqrt(unbiased) + 1e-8)


def learn(name, lag, versions, seed, offered):
    """Learns from segments until so many versions are out; returns the learner, and how old each segment was.

    None stands for a segment that was too old.
    """
    learner, ages = Learner(seed), []
    with mv.Publication(name, like=learner.weights) as publication:
        publication.publish(learner.weights, wait_seconds=DEADLINE_SECONDS)
        for segment in offered:
            age = publication.version - segment.version
            accepted = publication.accepts(segment.version, lag)
            assert accepted == (age <= lag), "the bound"
            ages.append(age if accepted else None)
            if accepted:
                learner.learn(segment)
                publication.publish(learner.weights, wait_seconds=DEADLINE_SECONDS)
            if publication.version > versions:
                break
    return learner, ages


def run(lag, versions, seed):
    """One run with actors, and once more without: what came of it."""
    name = f"cartpole-{os.getpid()}"
    context = multiprocessing.get_context("spawn")  # new processes, which are in no job
    segments = context.Queue(QUEUED)
    actors = [context.Process(target=act, args=(name, [seed, n], segments), daemon=True) for n in range(ACTORS)]
    kept = []

    def offered():
        while True:
            try:
                kept.append(segments.get(timeout=DEADLINE_SECONDS))
            except queue.Empty:
                dead = [actor.exitcode for actor in actors if actor.exitcode is not None]
                raise TimeoutError(f"no segment within {DEADLINE_SECONDS:g} s; ended actors: {dead}") from None
            yield kept[-1]

    for actor in actors:
        actor.start()
    try:
        learner, ages = learn(name, lag, versions, seed, offered())
    finally:
        for actor in actors:
            actor.terminate()
            actor.join()
        segments.close()
    again, ages_again = learn(f"{name}-again", lag, versions, seed, iter(kept))
    assert ages_again == ages, "the same segments are accepted"
    assert all(np.array_equal(again.weights[name], learner.weights[name]) for name in learner.weights)
    accepted = [age for age in ages if age is not None]
    return {
        "lag": lag,
        "seed": seed,
        "versions": versions,
        "offered": len(ages),
        "accepted": len(accepted),
        "mean_age": statistics.mean(accepted),
        "oldest": max(accepted),
        "reward": reward(learner.weights, 20, seed),
    }


def table(runs):
    """Returns what the runs of each bound have in the middle."""
    by_lag = {}
    for each in runs:
        by_lag.setdefault(each["lag"], []).append(each)
    return [
        {
            "lag": lag,
            "reward": statistics.median(each["reward"] for each in alike),
            "rewards": sorted(each["reward"] for each in alike),
            "accepted_of_offered": sum(each["accepted"] for each in alike) / sum(each["offered"] for each in alike),
            "mean_age": statistics.mean(each["mean_age"] for each in alike),
            "oldest": max(each["oldest"] for each in alike),
        }
        for lag, alike in by_lag.items()
    ]


def main():
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lag", type=int, default=4, help="how many versions old a segment may be")
    parser.add_argument("--versions", type=int, default=1000, help="of the policy, each a step of the learner")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--table", action="store_true", help="several bounds, each with several seeds")
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 1, 4, 16, 64], help="of the table")
    parser.add_argument("--repeat", type=int, default=5, help="seeds of each bound")
    parser.add_argument("--out", help="file for the table as JSON, too")
    options = parser.parse_args()
    if not options.table:
        print(json.dumps(run(options.lag, options.versions, options.seed)))
        return
    runs = []
    for seed in range(options.repeat):  # in turns, so that what else the machine does is spread over all
        for lag in options.lags:
            runs.append(run(lag, options.versions, seed))
            print(json.dumps(runs[-1]), flush=True)
    cores = len(os.sched_getaffinity(0))
    told = {"cores": cores, "python": platform.python_version(), "table": table(runs), "runs": runs}
    for row in told["table"]:
        print(json.dumps(row))
    if options.out:
        with open(options.out, "w") as file:
            file.write(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
