"""Byte-level tokens: the 256 bytes, and BEGIN, which opens every document.

A special token is placed by position and never read out of text: no sequence of bytes encodes to it.
"""

import numpy as np

BEGIN = 256
VOCABULARY = 257


def token_dtype(vocabulary: int) -> np.dtype:
    """The smallest dtype in which ids 0 to `vocabulary` - 1 are stored without wrapping.

    Raises:
      ValueError: fewer than 1 or more than 2^31 ids, which is what the int32 rows of a batch hold.
    """
    if not 1 <= vocabulary <= 2**31:
        raise ValueError(f"vocabulary={vocabulary}: 1 to {2**31} ids")
    return np.dtype(np.uint16 if vocabulary <= 2**16 else np.int32)


def encode(content: bytes) -> np.ndarray:
    """ids_T: BEGIN, then one id per byte; [len(content) + 1], `token_dtype(VOCABULARY)`."""
    ids_T = np.empty(len(content) + 1, token_dtype(VOCABULARY))
    ids_T[0] = BEGIN
    ids_T[1:] = np.frombuffer(content, np.uint8)
    return ids_T


def decode(ids_T: np.ndarray) -> bytes:
    """The bytes that these ids stand for; BEGIN stands for none.

    Args:
      ids_T: integers, any array-like of rank 1.

    Raises:
      ValueError: not integers in a row, or an id outside the vocabulary.
    """
    ids_T = np.asarray(ids_T)
    if ids_T.ndim != 1 or (ids_T.size and ids_T.dtype.kind not in "iu"):
        raise ValueError(f"ids of shape {ids_T.shape} and dtype {ids_T.dtype}: one row of integers is needed")
    strange = ids_T[(ids_T < 0) | (ids_T >= VOCABULARY)]
    if strange.size:
        raise ValueError(f"id {strange[0]}: ids are 0 to {VOCABULARY - 1}")
    return ids_T[ids_T != BEGIN].astype(np.uint8).tobytes()


def text(ids_T: np.ndarray) -> str:
    """`decode`, read as UTF-8 to show to people; bytes that are not UTF-8 become U+FFFD."""
    return decode(ids_T).decode("utf-8", errors="replace")
