"""A cluster file of one's own, by names of the catalogue. In: a device, counts, links. Out: TOML text to fill in."""

from __future__ import annotations

from weft.cluster.catalogue import FORMAT, entry, names
from weft.errors import UsageError
from weft.plan.toml_text import quoted


def draft(
    name: str,
    device: str,
    devices: int,
    *,
    nodes: int = 1,
    link: str = "",
    network: str = "",
    price_per_hour: float = 0.0,
    priced: str = "",
) -> str:
    """A file of `nodes` machines of `devices` devices each; `price_per_hour` in dollars, of all of them.

    Links that are not given are those of the catalogue's first machine with this device.

    >>> print(draft("ours", "H100", 4, price_per_hour=12.0).splitlines()[2])
    price_per_hour = 12

    Raises:
        ConfigError: a device or link that the catalogue lacks.
        UsageError: no machine of the catalogue has the device, and no link is given.
    """
    figures = entry("device", device)
    machine = next((joins for node in names() if (joins := entry("node", node))["device"] == device), None)
    if machine is None and not (link and (network or nodes == 1)):
        raise UsageError(f"no machine of the catalogue has {device}; say what joins the devices: --link, and --network between machines")
    inner = link or (machine or {})["link"]
    levels = [("node", devices, inner, "devices of a machine")]
    if nodes > 1:
        levels.append(("cluster", nodes, network or (machine or {})["network"], "machines"))
    precision = next((p for p in ("bfloat16", "float16") if p in figures["peak_flops"]), "float32")
    lines = [f"format = {FORMAT}", f"name = {quoted(name)}"]
    if price_per_hour:
        lines.append(f"price_per_hour = {price_per_hour:g}")
    if priced:
        lines.append(f"priced = {quoted(priced)}")
    lines += [
        f"# {figures['peak_flops'][precision] / 1e12:g} TFLOP/s in {precision}, {figures['memory_bytes'] / 1e9:g} GB.",
        "# A table has figures of your own:",
        f'# [device] like = "{device}", memory_bytes = 40e9',
        f'device = "{device}"',
    ]
    for level, size, joined, what in levels:
        joins = entry("link", joined)
        lines += [
            "",
            f"[[level]]  # {what}: {joins['bandwidth_bytes_per_s'] / 1e9:g} GB/s each way, {joins['latency_s'] * 1e6:g} us",
            f'name = "{level}"',
            f"size = {size}",
            f'link = "{joined}"',
        ]
    return "\n".join(lines) + "\n"
