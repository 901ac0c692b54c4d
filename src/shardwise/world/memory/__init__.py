"""Memory accounting of a rank's device by part: current, peak and limit. See `shardwise.world.memory.accounts`."""

from shardwise.world.memory.accounts import HOST, PARTS, Accounts, accounts_of

__all__ = ["HOST", "PARTS", "Accounts", "accounts_of"]
