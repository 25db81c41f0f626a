"""A patched Mask2Former as a file that torch and pillow alone serve, on a GPU if it was packaged on one, else on a CPU:
python examples/serve_aoti.py package --model ALIAS --out model.pt2
python examples/serve_aoti.py serve --out model.pt2
curl --data-binary @street.jpg localhost:8000"""

import argparse
import io
import json
from http.server import BaseHTTPRequestHandler, HTTPServer

import torch
from PIL import Image

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("action", choices=("package", "serve"))
parser.add_argument("--model", default="mask2former-swin-tiny-coco-instance", help="an alias, or a folder")
parser.add_argument("--out", default="model.pt2")
parser.add_argument("--size", type=int, default=384, help="images are resized to a square of so many pixels")
parser.add_argument("--port", type=int, default=8000)
DEVICE, DTYPE = ("cuda", "bfloat16") if torch.cuda.is_available() else ("cpu", "float32")


class Network(torch.nn.Module):
    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model.requires_grad_(False)
        self.mean, self.std = torch.tensor([[123.675, 116.28, 103.53], [58.395, 57.12, 57.375]], device=DEVICE)

    def forward(self, images):  # (B, size, size, 3), uint8
        outputs = self.model(((images - self.mean) / self.std).movedim(-1, 1).to(self.model.dtype))
        scores, labels = outputs.class_queries_logits.float().softmax(-1)[..., :-1].max(-1)
        return scores, labels, (outputs.masks_queries_logits > 0).float().mean((-1, -2))


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        image = Image.open(io.BytesIO(self.rfile.read(int(self.headers["Content-Length"])))).convert("RGB")
        rows = torch.frombuffer(bytearray(image.resize((args.size, args.size)).tobytes()), dtype=torch.uint8)
        results = [t[0].tolist() for t in model(rows.view(1, args.size, args.size, 3).to(device))]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps([found for found in zip(*results, strict=True) if found[0] > 0.5]).encode())


if __name__ == "__main__":
    args = parser.parse_args()
    if args.action == "package":
        import deformops_models as dm

        network = Network(dm.Mask2Former.from_pretrained(args.model, device=DEVICE, dtype=DTYPE)).to(DEVICE)
        images = (torch.zeros(2, args.size, args.size, 3, dtype=torch.uint8, device=DEVICE),)
        axes = [{0: torch.export.Dim("batch", min=1, max=16)}]
        program = torch.export.export(network, images, dynamic_shapes=axes, strict=False)
        torch._inductor.aoti_compile_and_package(program, package_path=args.out)
    else:
        torch.empty(0, device=DEVICE)  # starts CUDA, as the loader does not
        model = torch._inductor.aoti_load_package(args.out)
        device = model.get_metadata()["AOTI_DEVICE_KEY"]
        HTTPServer(("", args.port), Handler).serve_forever()
