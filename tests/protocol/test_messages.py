"""Messages survive the wire, and what is no message is refused."""

import json

import pytest

from xdit_backend.protocol import messages
from xdit_backend.protocol.errors import XDiTError
from xdit_backend.protocol.messages import decode, encode
from xdit_backend.protocol.segments import Segment

SEGMENT = Segment("/dev/shm/xdit/1", "bfloat16", (1, 16, 8, 8))
SPEC = messages.ModelSpec("flux-1", "Flux.1", "/models/flux.safetensors", "bfloat16", "bfloat16")
EXAMPLES = [
    messages.LoadModel(1, SPEC),
    messages.DropModel(2, "flux-1"),
    messages.Conditioning(3, "conditioning-1", {"context": SEGMENT}),
    messages.DropConditioning(4, ["conditioning-1"]),
    messages.Predict(5, "flux-1", messages.Layout(cfg_degree=2), [messages.Branch(SEGMENT, SEGMENT, "conditioning-1", SEGMENT)]),
    messages.LoadAutoencoder(6, messages.AutoencoderSpec("vae-1", "float32", {"decoder.conv_in.weight": SEGMENT})),
    messages.Decode(7, "vae-1", SEGMENT, SEGMENT),
    messages.Encode(7, "vae-1", SEGMENT, SEGMENT),
    messages.ReportMemory(8),
    messages.Stop(),
    messages.Ready(0, 4711, "cuda:0"),
    messages.Phase(1, "loading weights", 3, 40),
    messages.Done(9, 0, {"sent_bytes": 1024.0}),
    messages.Failed(10, 1, "cuda:1", "OutOfMemoryError", "no", "Traceback"),
]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_messages_survive_the_wire(message):
    assert decode(encode(message)) == message


def test_every_message_is_tried():
    assert {type(message) for message in EXAMPLES} == set(messages.MESSAGES.values())


@pytest.mark.parametrize("raw", [
    b"", b"\x80\x04.", b"[]", b'"Stop"', b'{"type": "Exec"}', b'{"type": "LoadModel", "request": 1}',
    b'{"type": "DropModel", "request": "1", "name": "x"}', b'{"type": "DropModel", "request": true, "name": "x"}',
    b'{"type": "Stop", "request": 0, "more": 1}', json.dumps({"type": "Conditioning", "request": 1, "name": "x",
                                                             "tensors": {"a": {"path": 1, "dtype": "f", "shape": []}}}).encode()])
def test_what_is_no_message_is_refused(raw):
    with pytest.raises(XDiTError, match="Not a message of this project"):
        decode(raw)
