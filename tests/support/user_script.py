"""A user's script, for type checkers: every function and type that `import shardwise` offers, as one would use them."""

import torch
from torch import nn

import shardwise


def loss(output: torch.Tensor, batch: object) -> torch.Tensor:
    return output.square().mean()


def main() -> None:
    chosen: shardwise.Plan = shardwise.plan("gpt-tiny", 8, cluster="1xcpu-2")
    print(chosen.layout.data, chosen.reasons)
    timeline: shardwise.Timeline = shardwise.simulate(chosen)
    print(timeline.total_s)
    print(shardwise.explain(chosen).record, shardwise.whatif(chosen, "zero=1").tables, shardwise.compare(chosen, chosen))
    print(shardwise.estimate("gpt-tiny", tokens="1e9")["time_s"], shardwise.report(chosen, "page.html").name)
    print(shardwise.scaling("gpt-tiny", 8, cluster="1xcpu-2", devices=[1, 2], weak=True)["sizes"])
    proof: shardwise.Verification = shardwise.verify("gpt-tiny", "data=2")
    print(proof.ok)
    engine: shardwise.Engine = shardwise.parallelize(lambda: nn.Linear(4, 2), (torch.zeros(8, 4),), loss=loss, plan=chosen)
    print(engine.step((torch.zeros(8, 4),)).loss)
    module = shardwise.auto_parallelize(nn.Linear(4, 2), (torch.zeros(8, 4),))
    for x in shardwise.shard([torch.zeros(8, 4)]):
        with shardwise.accumulate(module, last=True):
            module(x).sum().backward()
    shardwise.save("checkpoint", module)
    if shardwise.is_main:
        shardwise.print("saved", shardwise.is_main())
    cluster = shardwise.Cluster.parse("2xdgx-h100")
    print(cluster.num_devices, shardwise.Layout.parse("data=2").num_ranks)
