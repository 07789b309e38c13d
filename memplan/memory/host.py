"""CPU RAM as torch allocates it."""


def pinned_bytes(num_bytes: int) -> int:
    """A pinned block: torch rounds it up to a power of two [bytes].

    ATen/core/CachingHostAllocator.h (torch 2.13): ``PowerOf2Ceil``, without an upper limit.

    >>> pinned_bytes(5), pinned_bytes(4096)
    (8, 4096)
    """
    return 0 if num_bytes <= 0 else 1 << (num_bytes - 1).bit_length()
