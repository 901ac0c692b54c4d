"""Settings of a Ray that starts here for this process alone: it listens on loopback, and takes calls of holders of its token only.

Ray reads them when it is imported and when it starts; its other processes inherit them. One of its ports (calls between replicas of Ray
Serve) listens on all interfaces whatever one sets, so that the token is needed as well.
"""

from __future__ import annotations

import os
import secrets

# Ray's switch for systems whose firewalls ask about every listener: its nodes then have loopback's address.
_LISTENS_BEYOND_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


def configure_local_ray() -> None:
    """Set what a Ray started here reads from the environment; call it before Ray is imported. A token of the user's stays."""
    os.environ |= {_LISTENS_BEYOND_LOOPBACK: "0", "RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0"}
    if "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
