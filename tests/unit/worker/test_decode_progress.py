"""Progress of a decode is reported at least once per second of video."""

import pytest

from xdit_backend.worker.autoencoders import num_reports


@pytest.mark.parametrize("shape, frame_rate", [((1, 361, 720, 1280, 3), 16), ((2, 1441, 64, 64, 3), 24),
                                               ((1, 5, 64, 64, 3), 16)], ids=str)
def test_a_long_video_has_a_report_for_each_second(shape, frame_rate):
    assert num_reports(shape) >= max(20, shape[0] * shape[1] / frame_rate)


def test_an_image_has_twenty_reports():
    assert num_reports((4, 1024, 1024, 3)) == 20
