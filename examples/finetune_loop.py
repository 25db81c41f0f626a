"""A plain training loop on a patched Deformable DETR: python examples/finetune_loop.py --data DIR --out DIR."""

import argparse
import json
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from torchvision.datasets import CocoDetection

import deformops_models as dm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="deformable-detr", help="an alias, or a folder")
    parser.add_argument("--data", type=Path, required=True, help="as `deformops-models shapes --out DIR` writes it")
    parser.add_argument("--out", required=True)
    parser.add_argument("--epochs", type=int, default=1)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    file = args.data / "annotations" / "train.json"
    categories = json.loads(file.read_text())["categories"]
    labels = {category["id"]: label for label, category in enumerate(categories)}
    names = {labels[category["id"]]: category["name"] for category in categories}
    model = dm.DeformableDETR.from_pretrained(  # upstream's, patched; as many classes keep their places
        args.model, device=device, dtype=torch.float32, id2label=names, ignore_mismatched_sizes=True
    )
    processor = dm.DeformableDETR.processor(args.model, size="hub")

    def collate(samples):
        annotations = []
        for k, (_, objects) in enumerate(samples):
            objects = [{**o, "category_id": labels[o["category_id"]]} for o in objects if not o.get("iscrowd")]
            annotations.append({"image_id": k, "annotations": objects})
        return processor([image for image, _ in samples], annotations=annotations, return_tensors="pt")

    data = CocoDetection(args.data / "images" / "train", file)
    loader = DataLoader(data, batch_size=4, shuffle=True, collate_fn=collate)
    slow = [
        p for n, p in model.named_parameters() if any(k in n for k in ("backbone", "sampling_offsets", "reference"))
    ]
    rest = [p for p in model.parameters() if not any(p is q for q in slow)]
    optimizer = torch.optim.AdamW([{"params": slow, "lr": 2e-5}, {"params": rest}], lr=2e-4, weight_decay=1e-4)
    model.train()
    for epoch in range(args.epochs):
        for batch in loader:
            loss = model(**batch.to(device)).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            print(f"epoch {epoch} loss {loss.item():.4f}")
    model.save_pretrained(args.out)  # loads in plain transformers
    processor.save_pretrained(args.out)


if __name__ == "__main__":
    main()
