"""The README's table of families is what the rows and the tested detectors say."""

from table import README, write


def test_the_readme_has_the_table_of_now():
    text = README.read_text(encoding="utf-8")
    assert write(text) == text, "run python tests/families/table.py"
