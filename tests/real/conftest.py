"""What these tests share."""

from tests.pretrained import smollm2

__all__ = ["smollm2"]
