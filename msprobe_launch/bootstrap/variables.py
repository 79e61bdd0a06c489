"""What the launcher tells a rank-to-be through its environment. Constants only: the rank's first milliseconds read it.

The rank takes these variables out of its environment at once: its children see neither them nor our PYTHONPATH entry.
"""

# The resolved ProbeConfig as one line of JSON.
CONFIG = "MSPROBE_RANK_CONFIG"
# Present where the user's PYTHONPATH was set and empty: a PYTHONPATH that holds our folder alone cannot say so.
PYTHONPATH_WAS_EMPTY = "MSPROBE_RANK_PYTHONPATH_WAS_EMPTY"
