from kway.data.seeds import key


def test_keys_never_change():
    assert [key(), key(0), key(1), key(0, "order", 3), key("sample", -1), key(2**64 - 1)] == PINNED


def test_order_and_number_of_parts_count():
    found = [key(1, 2), key(2, 1), key(1), key(1, 0), key("1"), key("12"), key("1", "2")]
    assert len(set(found)) == len(found)


def test_keys_are_63_bits_and_half_of_the_bits_are_set():
    keys = [key(7, "sample", epoch, index) for epoch in range(10) for index in range(200)]
    assert len(set(keys)) == len(keys)
    assert all(0 <= value < 2**63 for value in keys)
    for bit in range(63):
        share = sum(value >> bit & 1 for value in keys) / len(keys)
        assert abs(share - 0.5) < 0.06, bit


def test_a_seed_of_torch_reads_like_its_unsigned_form():
    assert key(-1) == key(2**64 - 1)


PINNED = [
    0,
    6017775124710473527,
    3395948882924712079,
    5571276762575152031,
    8041231963606806036,
    3377987053190985883,
]
