"""Template of a cluster file from catalogue names. In: a device, counts, links. Out: TOML text to edit."""

from __future__ import annotations

from shardwise.cluster.catalogue import FORMAT, catalogue_entry, catalogue_names
from shardwise.errors import UsageError
from shardwise.plan.ir.toml_text import quote_string


def draft_cluster(
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
    """Return a cluster file of `nodes` machines of `devices` devices each; `price_per_hour` in dollars, of all of them.

    Missing links are those of the catalogue's first machine with this device.

    >>> print(draft_cluster("ours", "H100", 4, price_per_hour=12.0).splitlines()[2])
    price_per_hour = 12

    Raises:
        ConfigError: a device or link that the catalogue lacks.
        UsageError: no machine of the catalogue has the device, and a link is missing.
    """
    figures = catalogue_entry("device", device)
    machine = next((node_entry for node in catalogue_names() if (node_entry := catalogue_entry("node", node))["device"] == device), None)
    if machine is None and not (link and (network or nodes == 1)):
        raise UsageError(f"no machine of the catalogue has {device}; say what joins the devices: --link, and --network between machines")
    inner = link or (machine or {})["link"]
    levels = [("node", devices, inner, "devices of a machine")]
    if nodes > 1:
        levels.append(("cluster", nodes, network or (machine or {})["network"], "machines"))
    precision = next((p for p in ("bfloat16", "float16") if p in figures["peak_flops"]), "float32")
    lines = [f"format = {FORMAT}", f"name = {quote_string(name)}"]
    if price_per_hour:
        lines.append(f"price_per_hour = {price_per_hour:g}")
    if priced:
        lines.append(f"priced = {quote_string(priced)}")
    lines += [
        f"# {figures['peak_flops'][precision] / 1e12:g} TFLOP/s in {precision}, {figures['memory_bytes'] / 1e9:g} GB.",
        "# A table has figures of your own:",
        f'# [device] like = "{device}", memory_bytes = 40e9',
        f'device = "{device}"',
    ]
    for level, size, link_name, what in levels:
        link_entry = catalogue_entry("link", link_name)
        lines += [
            "",
            f"[[level]]  # {what}: {link_entry['bandwidth_bytes_per_s'] / 1e9:g} GB/s each way, {link_entry['latency_s'] * 1e6:g} us",
            f'name = "{level}"',
            f"size = {size}",
            f'link = "{link_name}"',
        ]
    return "\n".join(lines) + "\n"
