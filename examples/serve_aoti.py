"""A patched Mask2Former as a file that torch and pillow alone serve, on a GPU if it was packaged on one, else on a CPU:
python examples/serve_aoti.py package --model ALIAS --out model.pt2
python examples/serve_aoti.py serve --out model.pt2
curl --data-binary @street.jpg localhost:8000     # [[score, label, share of the image], ...]"""

import argparse
import io
import json
from wsgiref.simple_server import make_server

import torch
from PIL import Image

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("action", choices=("package", "serve"))
parser.add_argument("--model", default="mask2former-swin-tiny-coco-instance", help="an alias, or a folder")
parser.add_argument("--out", default="model.pt2")
parser.add_argument("--size", type=int, default=384, help="images are resized to a square of so many pixels")
parser.add_argument("--port", type=int, default=8000)


class Network(torch.nn.Sequential):  # of one detector
    def forward(self, images):  # (B, size, size, 3), uint8
        outputs = self[0](((images - self.mean) / self.std).movedim(-1, 1).to(self[0].dtype))
        scores, labels = outputs.class_queries_logits.float().softmax(-1)[..., :-1].max(-1)
        return scores, labels, (outputs.masks_queries_logits > 0).float().mean((-1, -2))


def answer(request, respond):
    try:
        image = Image.open(io.BytesIO(request["wsgi.input"].read(int(request["CONTENT_LENGTH"])))).convert("RGB")
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        respond("400 Bad Request", [])
        return [f"the body is no image: {error}\n".encode()]
    pixels = torch.frombuffer(bytearray(image.resize((size, size)).tobytes()), dtype=torch.uint8).view(1, size, size, 3)
    results = zip(*(t[0].tolist() for t in model(pixels.to(facts["AOTI_DEVICE_KEY"]))), strict=True)
    respond("200 OK", [("Content-Type", "application/json")])
    return [json.dumps([(score, names[str(label)], area) for score, label, area in results if score > 0.5]).encode()]


if __name__ == "__main__":
    args = parser.parse_args()
    device, dtype = ("cuda", "bfloat16") if torch.cuda.is_available() else ("cpu", "float32")
    torch.empty(0, device=device)  # starts CUDA, as the loader does not
    if args.action == "package":
        import deformops_models as dm

        network = Network(dm.Mask2Former.from_pretrained(args.model, device=device, dtype=dtype).requires_grad_(False))
        network.mean, network.std = torch.tensor([[123.675, 116.28, 103.53], [58.395, 57.12, 57.375]], device=device)
        images = (torch.zeros(2, args.size, args.size, 3, dtype=torch.uint8, device=device),)
        axes = [{0: torch.export.Dim("batch", min=1, max=16)}]
        program = torch.export.export(network, images, dynamic_shapes=axes, strict=False)
        configs = {"aot_inductor.metadata": {"size": str(args.size), "names": json.dumps(network[0].config.id2label)}}
        torch._inductor.aoti_compile_and_package(program, package_path=args.out, inductor_configs=configs)
    else:
        model = torch._inductor.aoti_load_package(args.out)
        facts = model.get_metadata()
        size, names = int(facts["size"]), json.loads(facts["names"])
        make_server("localhost", args.port, answer).serve_forever()
