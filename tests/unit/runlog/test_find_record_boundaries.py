"""Scanning: unfinished and damaged are told apart, and hostile input costs no more than its length."""

import struct

from sonde.runlog import find_record_boundaries as scanning
from sonde.runlog import record_format as f
from sonde.runlog.find_record_boundaries import DamagedSpan, scan

ONE, TWO, THREE = (f.record(f.EVENT, text * 20) for text in (b"one", b"two", b"three"))


def payloads(buffer, **rest):
    return [buffer[found.start : found.end][:-1].decode()[:2] for found in scan(buffer, **rest).records]


def test_whole_records_are_found_from_any_record_on():
    assert payloads(ONE + TWO + THREE) == ["on", "tw", "th"]
    assert payloads(ONE + TWO + THREE, offset=len(ONE)) == ["tw", "th"]
    assert scan(ONE + TWO).offset == len(ONE + TWO)


def test_a_record_that_is_cut_off_is_waited_for():
    for length in range(1, len(TWO)):
        result = scan(ONE + TWO[:length])
        assert (len(result.records), result.offset, result.damage) == (1, len(ONE), [])
        assert result.wanted > len(ONE) + length


def test_a_record_that_was_cut_off_in_the_middle_is_damage():
    for length in range(1, len(TWO)):
        result = scan(ONE + TWO[:length] + THREE)
        assert len(result.records) == 2
        assert [lost[:2] for lost in result.damage] == [(len(ONE), len(ONE) + length)]


def test_every_flipped_bit_costs_one_record_and_no_more():
    buffer = ONE + TWO + THREE
    for bit in range(8 * len(ONE), 8 * len(ONE + TWO)):
        flipped = bytearray(buffer)
        flipped[bit // 8] ^= 1 << bit % 8
        result = scan(bytes(flipped))
        assert len(result.records) == 2
        assert [lost[:2] for lost in result.damage] == [(len(ONE), len(ONE + TWO))]


def test_a_damaged_length_is_no_reason_to_wait_or_to_allocate():
    liar = bytearray(TWO)
    liar[8:12] = struct.pack("<I", 1_919_251_561)
    result = scan(ONE + bytes(liar) + THREE)
    assert len(result.records) == 2
    assert result.damage == [DamagedSpan(len(ONE), len(ONE + TWO), "an impossible length")]


def test_garbage_at_the_end_is_damage_but_the_beginning_of_a_marker_is_not():
    result = scan(ONE + bytes(4096) + f.MARKER[:2])
    assert result.damage == [DamagedSpan(len(ONE), len(ONE) + 4096, "not a record")]
    assert result.offset == len(ONE) + 4096


def test_a_marker_inside_of_a_payload_does_not_matter():
    odd = f.record(f.FRAME, b"abc" + f.MARKER + bytes(70_000) + f.MARKER + struct.pack("<B3sII", 3, b"", 5, 0) + b"12345")
    assert len(scan(ONE + odd + TWO).records) == 3
    assert not scan(ONE + odd + TWO).damage


def test_a_window_that_is_not_the_end_asks_for_the_rest():
    result = scan((ONE + TWO)[:-1], at_end=False)
    assert (len(result.records), result.offset, result.wanted) == (1, len(ONE), len(ONE + TWO))


def test_forged_records_inside_records_are_given_up_after_linear_work(monkeypatch):
    # each of these claims all that follows: checked one by one they would cost the square of the length
    length = 16 * 20_000
    forged = b"".join(
        f.MARKER + struct.pack("<B3sII", 3, b"", length - 16 * (i + 1), 1) for i in range(length // 16)
    )
    num_bytes = 0
    real = scanning.zlib.crc32

    class Counting:
        @staticmethod
        def crc32(data, start=0):
            nonlocal num_bytes
            num_bytes += len(data)
            return real(data, start)

    monkeypatch.setattr(scanning, "zlib", Counting)
    result = scan(forged)
    assert not result.records
    assert result.damage[0].start == 0
    assert num_bytes < 2 * (scanning.MAX_FAILED * length + scanning.MIN_FAILED_BYTES)


def test_thousands_of_bare_markers_are_passed_over():
    result = scan(f.MARKER * 50_000 + ONE)
    assert len(result.records) == 1
    assert len(result.damage) == 1
