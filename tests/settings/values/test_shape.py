"""Shapes of samples, and how they are written."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simpletuner.settings.values.shape import Shape, normalize_shapes, parse_shapes

SIDES = st.integers(1, 999_999)


@given(SIDES, SIDES)
def test_a_shape_is_read_as_it_is_written(width, height):
    shape = Shape(1, height, width)
    assert Shape.parse(str(shape)) == shape and shape.size == (width, height) and shape.area == width * height


def test_width_is_written_first_and_height_is_the_first_axis_after_frames():
    assert Shape.parse("96x64") == Shape(1, 64, 96) == (1, 64, 96)
    assert Shape.parse("96x64").in_cells(Shape(4, 8, 8)) == Shape(1, 8, 12)
    assert parse_shapes("64,96x64") == [Shape(1, 64, 64), Shape(1, 64, 96)] and parse_shapes("") == []


@pytest.mark.parametrize("text", ["0", "64x", "x64", "64x64x9", "1234567", "64,", "-64", "٦٤"])
def test_anything_else_is_refused(text):
    with pytest.raises(ValueError, match="write an edge"):
        normalize_shapes(text)


def test_shapes_that_stand_there_twice_are_refused():
    assert normalize_shapes("64, 96X64") == "64,96x64" and normalize_shapes("") == ""
    with pytest.raises(ValueError, match="64x64 stands there twice"):
        normalize_shapes("64,64x64")
