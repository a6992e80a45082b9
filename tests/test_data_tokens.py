"""Bytes to ids and back; special tokens by position only."""

import numpy as np
import pytest

from k3jax.data.tokens import BEGIN, VOCABULARY, decode, encode, text, token_dtype


def test_every_byte_comes_back():
    content = bytes(range(256)) * 2
    ids_T = encode(content)
    assert ids_T.shape == (513,)
    assert ids_T.dtype == token_dtype(VOCABULARY)
    assert ids_T[0] == BEGIN
    assert decode(ids_T) == content
    assert decode(ids_T[1:].astype(np.int32)) == content


def test_no_content_is_begin_alone():
    assert encode(b"").tolist() == [BEGIN]
    assert decode(np.array([])) == decode(encode(b"")) == b""


# Names of special tokens, their id in digits, and its bytes in either order.
@pytest.mark.parametrize(
    "spelling", [b"<|begin|>", b"BEGIN", b"[BOS]", b"<s>", b"256", b"\x00\x01", b"\x01\x00"]
)
def test_text_that_spells_a_control_token_stays_bytes(spelling):
    ids_T = encode(spelling)
    assert ids_T[1:].tolist() == list(spelling)
    assert not (ids_T[1:] == BEGIN).any()


@pytest.mark.parametrize("vocabulary", [1, 257, 2**16, 2**16 + 1, 163_840, 2**31])
def test_no_id_wraps(vocabulary):
    largest = vocabulary - 1
    ids_T = np.array([0, largest]).astype(token_dtype(vocabulary))
    assert ids_T.tolist() == [0, largest]
    assert token_dtype(vocabulary).itemsize == (2 if vocabulary <= 2**16 else 4)


@pytest.mark.parametrize("vocabulary", [0, -1, 2**31 + 1])
def test_a_vocabulary_that_rows_cannot_hold_is_an_error(vocabulary):
    with pytest.raises(ValueError, match=f"vocabulary={vocabulary}"):
        token_dtype(vocabulary)


@pytest.mark.parametrize("strange", [VOCABULARY, -1, 65536 + 97])
def test_an_id_outside_the_vocabulary_is_an_error(strange):
    with pytest.raises(ValueError, match=f"id {strange}: ids are 0 to 256"):
        decode(np.array([97, strange]))


@pytest.mark.parametrize("ids", [np.array([1.0]), np.zeros((2, 2), np.int32), np.int32(1)])
def test_what_is_no_row_of_ids_is_an_error(ids):
    with pytest.raises(ValueError, match="one row of integers"):
        decode(ids)


def test_text_shows_what_it_can():
    assert text(encode("naïve".encode())) == "naïve"
    assert text(encode(b"a\xffb")) == "a\ufffdb"
