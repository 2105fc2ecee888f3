"""Fine-tune a real Brax PPO agent; a rules file says what is frozen and what trains.

1. PPO trains an agent to balance Brax's inverted double pendulum. All parameters train.
2. The cart's motor is reversed: every push goes the wrong way.
3. PPO fine-tunes the agent as ``brax_ppo.toml`` says: the first layers of the policy
   are frozen, its others train fast, and the value network trains slowly. The params
   are Brax's own ``PPONetworkParams``, a Flax dataclass.
4. The same run again, with the params in a NamedTuple: one rules file fits both kinds.
5. The same run without rules, so that there is something to compare with.
6. Every parameter is compared with its start. Under the rules the frozen ones must be
   the same bit for bit, and all others must have moved. Otherwise the exit status is 1.

Run it with ``make demo`` or ``python docs/examples/brax_ppo.py``. It takes a
minute on two CPU cores, more than half of it compilation.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

import treeadapt as ta

# On import, MuJoCo prints that its optional Warp backend is missing; we do not need it.
with contextlib.redirect_stdout(io.StringIO()):
    from brax import envs
    from brax.envs.wrappers import training as wrappers
    from brax.training import acting
    from brax.training.acme import running_statistics, specs
    from brax.training.agents.ppo import losses, networks
    from brax.training.types import Params, Transition

    Normalizer = running_statistics.RunningStatisticsState

RULES_FILE = Path(__file__).with_suffix(".toml")

EPISODE_LENGTH = 200  # steps
STEP_REWARD = 9.36  # at most
UNROLL_LENGTH = 40  # steps of every environment before an update
NUM_EPOCHS = 4
NUM_MINIBATCHES = 16
EVALUATE_EVERY = 10  # updates

NO_RULES = "no rules"  # the run in which nothing is frozen


class PPONetworkParams(NamedTuple):
    """The fields of Brax's dataclass of the same name, as a NamedTuple."""

    policy: Params
    value: Params


def main() -> int:
    """Run the six steps; return the exit status."""
    args = parse_args()
    # Brax's wrappers read the shape of a key, so keys are raw.
    keys = jax.random.split(jax.random.PRNGKey(args.seed), 3)
    key_init, key_pretrain, key_finetune = keys
    ppo = PPO(num_envs=args.envs, num_updates=args.updates)

    print("1. Pretrain on the double pendulum: all parameters train. (Compiles first.)")
    print(f"   An episode earns {EPISODE_LENGTH * STEP_REWARD:.0f} at most.")
    params, normalizer = ppo.init(key_init)
    params, normalizer = ppo.train(
        optax.adam(3e-3), params, normalizer, key_pretrain, motor=1.0
    )

    print(f"\n2. Reverse the motor. {RULES_FILE.name} says what may still change.")
    print(
        "   Look at the columns label and rule: the first rule that matches decides.\n"
    )
    rules = ta.load_rules(RULES_FILE)
    print(ta.summarize(params, rules))
    # The same file says what trains each label; the parameters may be in any container.
    tx = ta.load_optimizer(RULES_FILE)

    ends = {}
    print("\n3. Fine-tune by these rules. The params are Brax's PPONetworkParams.")
    ends["brax"] = ppo.train(tx, params, normalizer, key_finetune, motor=-1.0)[0]

    print(
        "\n4. The same with a NamedTuple: the same file, so the rewards are the same."
    )
    named = PPONetworkParams(params.policy, params.value)
    ends["namedtuple"] = ppo.train(tx, named, normalizer, key_finetune, motor=-1.0)[0]

    print("\n5. The same without rules, for comparison: Adam trains every parameter.")
    plain = optax.adam(3e-3)
    ends[NO_RULES] = ppo.train(plain, params, normalizer, key_finetune, motor=-1.0)[0]

    print("\n6. Compare every parameter with its start. Look at the frozen ones.\n")
    return compare(params, ends, rules)


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--updates", type=int, default=30, help="in each training (default: 30)"
    )
    parser.add_argument(
        "--envs", type=int, default=128, help="stepped in parallel (default: 128)"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.updates < 1:
        parser.error("--updates must be at least 1")
    if args.envs < 1 or args.envs % NUM_MINIBATCHES:
        parser.error(f"--envs must be a multiple of {NUM_MINIBATCHES}")
    return args


class Motor(envs.Wrapper):
    """Multiplies actions by ``info["motor"]``; -1.0 is a reversed motor."""

    def reset(self, rng: jax.Array) -> envs.State:
        """Return a first state with a normal motor."""
        state = self.env.reset(rng)
        state.info["motor"] = jnp.float32(1.0)
        return state

    def step(self, state: envs.State, action: jax.Array) -> envs.State:
        """Return the next state."""
        return self.env.step(state, state.info["motor"] * action)


class PPO:
    """Brax's PPO on its double pendulum, as a loop that accepts any optimizer.

    Args:
        num_envs: environments that run in parallel. num_updates: rollouts to learn from
        in one training.
    """

    def __init__(self, *, num_envs: int, num_updates: int):
        self.num_envs = num_envs
        self.num_updates = num_updates
        with warnings.catch_warnings():
            # Brax warns that its environments are no longer developed.
            warnings.filterwarnings("ignore", "Brax System")
            env = envs.get_environment("inverted_double_pendulum", backend="spring")
        env = wrappers.wrap(Motor(env), episode_length=EPISODE_LENGTH)
        self.env = wrappers.EvalWrapper(env)
        # ``env.observation_size`` compiles a reset, operation by operation.
        (self.num_observations,) = jax.eval_shape(
            env.reset, jax.random.split(jax.random.PRNGKey(0), 1)
        ).obs.shape[1:]
        self.networks = networks.make_ppo_networks(
            self.num_observations,
            env.action_size,
            preprocess_observations_fn=running_statistics.normalize,
            value_hidden_layer_sizes=(64, 64, 64),
        )
        self.make_policy = networks.make_inference_fn(self.networks)
        self.loss = functools.partial(
            losses.compute_ppo_loss,
            ppo_network=self.networks,
            entropy_cost=1e-3,
            discounting=0.97,
            reward_scaling=0.1,
        )

    def init(self, key: jax.Array) -> tuple[losses.PPONetworkParams, Normalizer]:
        """Return fresh parameters and a normalizer that has seen nothing."""
        key_policy, key_value = jax.random.split(key)
        params = losses.PPONetworkParams(
            policy=self.networks.policy_network.init(key_policy),
            value=self.networks.value_network.init(key_value),
        )
        observation = specs.Array((self.num_observations,), jnp.dtype("float32"))
        return params, running_statistics.init_state(observation)

    def train(
        self,
        tx: optax.GradientTransformation,
        params: Any,
        normalizer: Normalizer,
        key: jax.Array,
        *,
        motor: float,
    ) -> tuple[Any, Normalizer]:
        """Train ``params``, of any kind, and print the reward on the way."""
        key, key_reset, key_reward = jax.random.split(key, 3)
        columns = "   {task.description}", BarColumn(), MofNCompleteColumn()
        with Progress(*columns, TimeElapsedColumn()) as progress:
            bar = progress.add_task("updates", total=self.num_updates)
            rewards = [self.reward(params, normalizer, key_reward, motor)]
            env_state = self.reset(key_reset, motor)
            opt_state = tx.init(params)
            for count in range(1, self.num_updates + 1):
                key, key_collect, key_learn = jax.random.split(key, 3)
                env_state, data = self.collect(
                    env_state, params.policy, normalizer, key_collect
                )
                params, opt_state, normalizer = self.learn(
                    tx, params, opt_state, normalizer, data, key_learn
                )
                if count % EVALUATE_EVERY == 0 or count == self.num_updates:
                    rewards.append(self.reward(params, normalizer, key_reward, motor))
                progress.advance(bar)
        print("   reward of an episode:", " -> ".join(f"{r:.0f}" for r in rewards))
        return params, normalizer

    def reward(
        self, params: Any, normalizer: Normalizer, key: jax.Array, motor: float
    ) -> float:
        """Return the mean reward of one whole episode in each environment."""
        env_state = self.reset(key, motor)
        for key_collect in jax.random.split(key, EPISODE_LENGTH // UNROLL_LENGTH):
            env_state, _ = self.collect(
                env_state, params.policy, normalizer, key_collect
            )
        return float(env_state.info["eval_metrics"].episode_metrics["reward"].mean())

    @functools.partial(jax.jit, static_argnames="self")
    def reset(self, key: jax.Array, motor: float) -> envs.State:
        """Return the first state of all environments."""
        env_state = self.env.reset(jax.random.split(key, self.num_envs))
        env_state.info["motor"] *= motor
        return env_state

    @functools.partial(jax.jit, static_argnames="self")
    def collect(
        self,
        env_state: envs.State,
        policy_params: Params,
        normalizer: Normalizer,
        key: jax.Array,
    ) -> tuple[envs.State, Transition]:
        """Let the policy act; return the states it leads to, and what happened."""
        return acting.generate_unroll(
            self.env,
            env_state,
            self.make_policy((normalizer, policy_params)),
            key,
            UNROLL_LENGTH,
            extra_fields=("truncation",),
        )

    @functools.partial(jax.jit, static_argnames=("self", "tx"))
    def learn(
        self,
        tx: optax.GradientTransformation,
        params: Any,
        opt_state: optax.OptState,
        normalizer: Normalizer,
        data: Transition,
        key: jax.Array,
    ) -> tuple[Any, optax.OptState, Normalizer]:
        """Learn from what happened, in some epochs of shuffled minibatches."""
        # Brax's loss takes environments first and time second.
        data = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), data)
        normalizer = running_statistics.update(normalizer, data.observation)

        def step(carry, batch):
            params, opt_state = carry
            minibatch, key = batch
            grad = jax.grad(self.loss, has_aux=True)
            grads, _ = grad(params, normalizer, minibatch, key)
            updates, opt_state = tx.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), None

        def epoch(carry, key):
            key_order, key_loss = jax.random.split(key)
            order = jax.random.permutation(key_order, self.num_envs)
            minibatches = jax.tree.map(
                lambda x: x[order].reshape(NUM_MINIBATCHES, -1, *x.shape[1:]), data
            )
            keys = jax.random.split(key_loss, NUM_MINIBATCHES)
            return jax.lax.scan(step, carry, (minibatches, keys))

        keys = jax.random.split(key, NUM_EPOCHS)
        (params, opt_state), _ = jax.lax.scan(epoch, (params, opt_state), keys)
        return params, opt_state, normalizer


def compare(start: Any, ends: dict[str, Any], rules: ta.Rules) -> int:
    """Print how every parameter changed; return 1 if any broke a rule, else 0."""
    labels = ta.to_flat_dict(ta.param_labels(start, rules))
    moves = {run: largest_moves(start, end) for run, end in ends.items()}
    width = max(map(len, labels))
    header = ["path".ljust(width), " label  ", *(f"{run:<12}" for run in moves)]
    print(" ".join(header).rstrip())
    num_broken = 0
    for path, label in labels.items():
        cells = []
        for run in moves:
            move = moves[run][path]
            is_frozen = label == "frozen" and run != NO_RULES
            is_broken = (move is None) != is_frozen
            num_broken += is_broken
            text = "same bits" if move is None else f"moved {move:.3f}"
            cells.append(f"{text + ' (!)' * is_broken:<12}")
        print(" ".join([path.ljust(width), f" {label:<7}", *cells]).rstrip())
    if num_broken:
        print(f"\n{num_broken} parameters, marked (!), broke the rules.")
        return 1
    num_frozen = sum(label == "frozen" for label in labels.values())
    num_others = len(labels) - num_frozen
    print(
        f"\nUnder the rules: {num_frozen} frozen parameters, the same bit for bit; ",
        end="",
    )
    print(f"{num_others} others, all moved.")
    return 0


def largest_moves(before: Any, after: Any) -> dict[str, float | None]:
    """Return by path how far a parameter moved; None if not one bit differs."""
    after = ta.to_flat_dict(after)
    moves: dict[str, float | None] = {}
    for path, leaf in ta.to_flat_dict(before).items():
        old, new = np.asarray(leaf), np.asarray(after[path])
        is_same = old.tobytes() == new.tobytes()
        moves[path] = None if is_same else float(abs(new - old).max())
    return moves


if __name__ == "__main__":
    sys.exit(main())
