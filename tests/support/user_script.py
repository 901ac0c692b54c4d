"""A user's script, for type checkers: every function and type that `import weft` offers, as one would use them."""

import torch
from torch import nn

import weft


def loss(output: torch.Tensor, batch: object) -> torch.Tensor:
    return output.square().mean()


def main() -> None:
    chosen: weft.Plan = weft.plan("gpt-tiny", 8, cluster="1xcpu-2")
    print(chosen.layout.data, chosen.reasons)
    timeline: weft.Timeline = weft.simulate(chosen)
    print(timeline.total_s)
    print(weft.explain(chosen).record, weft.whatif(chosen, "zero=1").tables, weft.compare(chosen, chosen))
    print(weft.estimate("gpt-tiny", tokens="1e9")["time_s"], weft.report(chosen, "page.html").name)
    print(weft.scaling("gpt-tiny", 8, cluster="1xcpu-2", devices=[1, 2], weak=True)["sizes"])
    proof: weft.Verification = weft.verify("gpt-tiny", "data=2")
    print(proof.ok)
    engine: weft.Engine = weft.parallelize(lambda: nn.Linear(4, 2), (torch.zeros(8, 4),), loss=loss, plan=chosen)
    print(engine.step((torch.zeros(8, 4),)).loss)
    module = weft.auto_parallelize(nn.Linear(4, 2), (torch.zeros(8, 4),))
    for x in weft.shard([torch.zeros(8, 4)]):
        with weft.accumulate(module, last=True):
            module(x).sum().backward()
    weft.save("checkpoint", module)
    if weft.is_main:
        weft.print("saved", weft.is_main())
    cluster = weft.Cluster.parse("2xdgx-h100")
    print(cluster.num_devices, weft.Layout.parse("data=2").num_ranks)
