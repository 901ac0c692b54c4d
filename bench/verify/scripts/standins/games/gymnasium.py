"""A cart with a pole, as `gym.make` and `gym.vector` have it: four numbers seen, two actions, an end where the pole falls."""

from types import SimpleNamespace

import numpy as np

G, CART, POLE, HALF, FORCE, TAU = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02


class Discrete:
    def __init__(self, n):
        self.n, self.shape = n, ()


spaces = SimpleNamespace(Discrete=Discrete)
wrappers = SimpleNamespace(RecordEpisodeStatistics=lambda env: env)


class Cart:
    def reset(self, seed=None):
        self.draw = np.random.default_rng(seed) if seed is not None or not hasattr(self, "draw") else self.draw
        self.state, self.steps = self.draw.uniform(-0.05, 0.05, 4), 0
        return self.state

    def step(self, action):
        x, speed, angle, turn = self.state
        push = FORCE if action == 1 else -FORCE
        sine, cosine, mass = np.sin(angle), np.cos(angle), CART + POLE
        part = (push + POLE * HALF * turn**2 * sine) / mass
        bend = (G * sine - cosine * part) / (HALF * (4 / 3 - POLE * cosine**2 / mass))
        along = part - POLE * HALF * bend * cosine / mass
        self.state = np.array([x + TAU * speed, speed + TAU * along, angle + TAU * turn, turn + TAU * bend])
        self.steps += 1
        return self.state, bool(abs(self.state[0]) > 2.4 or abs(self.state[2]) > 0.209), self.steps >= 500


def make(name, **settings):
    return Cart()


class SyncVectorEnv:
    """Several carts; one that ends begins again."""

    single_observation_space = SimpleNamespace(shape=(4,))
    single_action_space = Discrete(2)

    def __init__(self, makers):
        self.envs = [one() for one in makers]

    def reset(self, seed=None):
        return np.stack([env.reset(seed + i) for i, env in enumerate(self.envs)]), {}

    def step(self, actions):
        rows = [env.step(action) for env, action in zip(self.envs, actions, strict=True)]
        states = [env.reset() if ended or late else state for env, (state, ended, late) in zip(self.envs, rows, strict=True)]
        ended, late = (np.array([row[i] for row in rows]) for i in (1, 2))
        return np.stack(states), np.ones(len(rows)), ended, late, {}

    def close(self):
        pass


vector = SimpleNamespace(SyncVectorEnv=SyncVectorEnv)
