"""What the launcher tells a rank-to-be through its environment. Constants only: the rank's first milliseconds read it.

The rank takes these variables out of its environment at once: its children see neither them nor our PYTHONPATH entry.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

# The resolved ProbeConfig as one line of JSON.
CONFIG = "MSPROBE_RANK_CONFIG"
# Present where the user's PYTHONPATH was set and empty: a PYTHONPATH that holds our folder alone cannot say so.
PYTHONPATH_WAS_EMPTY = "MSPROBE_RANK_PYTHONPATH_WAS_EMPTY"
# Number of this start of the ranks, where the launcher counts them itself.
ATTEMPT = "MSPROBE_RANK_ATTEMPT"
# What the rank variables said before another launcher came into play, as `numbers` has it: that numbers nobody.
INHERITED = "MSPROBE_RANK_INHERITED"
# The one variable that numbers the ranks, where the user has named it.
RANK_FROM = "MSPROBE_RANK_FROM"
# Present where the rank shall answer the launcher's question where it is (`hang`).
HANG = "MSPROBE_RANK_HANG"
OURS = (CONFIG, PYTHONPATH_WAS_EMPTY, ATTEMPT, INHERITED, RANK_FROM, HANG)

# Rank, world size, local rank, by whoever starts the processes. The first that is there counts: what a launcher of
# Python ranks sets is nearer to the rank than what the scheduler around it sets.
RANK_SOURCES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),  # torchrun, accelerate, deepspeed
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),  # Open MPI
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),  # MPICH, Intel MPI
    ("PMIX_RANK", "", ""),  # PMIx
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),  # srun
    ("MS_NODE_ID", "MS_WORKER_NUM", "DEVICE_ID"),  # MindSpore's msrun
    ("RANK_ID", "RANK_SIZE", "DEVICE_ID"),  # MindSpore without a scheduler: a rank table, a simulation
)
# A worker of MindSpore's cluster that MindSpore will number when it joins. What RANK_ID says until then is not its own:
# msrun leaves the scheduler's 0 there.
NUMBERED_LATER = ("", "MS_WORKER_NUM", "DEVICE_ID")


def numbers(environ: Mapping[str, str], source: tuple[str, str, str]) -> str:
    """What the variables of one source say, as one text."""
    return f"{source[0]}={'/'.join(environ.get(name, '') for name in source)}"


def rank_source(environ: Mapping[str, str]) -> tuple[str, str, str] | None:
    """The names (rank, world size, local rank) that number this process, or None where nothing does.

    The first name is empty for a process that MindSpore will number.
    """
    role = environ.get("MS_ROLE")
    if role == "MS_SCHED":
        return None  # msrun's scheduler runs the script as well
    named = environ.get(RANK_FROM)
    inherited = environ.get(INHERITED, "").split(",")
    only = named
    if role == "MS_WORKER" and not named:
        # Any text may tell nodes of a cluster apart; only msrun's is the rank.
        if not environ.get("MS_NODE_ID", "").isdigit():
            return NUMBERED_LATER
        only = "MS_NODE_ID"
    for source in RANK_SOURCES:
        if source[0] not in environ or (only and source[0] != only):
            continue
        if named or numbers(environ, source) not in inherited:
            return source
    return (named, "", "") if named and named in environ else None
