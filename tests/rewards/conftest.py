import pytest

from rewards.ocr import OCR


@pytest.fixture(scope="session")
def ocr():
    """One engine for all: to start it takes as long as to read five images."""
    return OCR(threads=1)
