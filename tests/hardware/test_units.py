from maniple.hardware.units import binary_size


def test_sizes_are_in_the_largest_unit_of_which_there_is_one():
    sizes = (0, 1536, 2**20 - 1, 2**20, 49.04 * 2**20, 2**30, 1234.5 * 2**30)
    said = ["0.0 KiB", "1.5 KiB", "1,024.0 KiB", "1.0 MiB", "49.0 MiB", "1.00 GiB", "1,234.50 GiB"]
    assert [binary_size(size) for size in sizes] == said
