"""The same `weft train` on other machines: what is started where (`job`), and each way of starting it."""
