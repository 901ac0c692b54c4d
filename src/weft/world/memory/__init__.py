"""What a rank's device holds, by part: counted, limited, and the highest told. See `weft.world.memory.accounts`."""

from weft.world.memory.accounts import HOST, PARTS, Accounts, accounts_of

__all__ = ["HOST", "PARTS", "Accounts", "accounts_of"]
