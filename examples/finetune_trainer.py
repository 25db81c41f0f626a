"""transformers' Trainer on a patched Mask2Former: python examples/finetune_trainer.py --data DIR --out DIR."""

import argparse
import json
from pathlib import Path

import torch
from torch.nn.functional import interpolate
from torchvision.datasets import CocoDetection
from transformers import Trainer, TrainingArguments

import deformops_models as dm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="mask2former-swin-tiny-coco-instance", help="an alias, or a folder")
    parser.add_argument("--data", type=Path, required=True, help="as `deformops-models shapes --out DIR` writes it")
    parser.add_argument("--out", required=True)
    parser.add_argument("--epochs", type=float, default=1)
    args = parser.parse_args()

    file = args.data / "annotations" / "train.json"
    categories = json.loads(file.read_text())["categories"]
    labels = {category["id"]: label for label, category in enumerate(categories)}
    names = {labels[category["id"]]: category["name"] for category in categories}
    model = dm.Mask2Former.from_pretrained(  # upstream's, patched; as many classes keep their places
        args.model, dtype=torch.float32, id2label=names, ignore_mismatched_sizes=True
    )
    processor = dm.Mask2Former.processor(args.model, size="hub")
    data = CocoDetection(args.data / "images" / "train", file)

    def collate(samples):
        batch = processor([image for image, _ in samples], return_tensors="pt")
        batch["mask_labels"], batch["class_labels"] = [], []
        for mask, (_, objects) in zip(batch["pixel_mask"], samples, strict=True):
            objects = [o for o in objects if not o.get("iscrowd")]
            height, width = int(mask.any(1).sum()), int(mask.any(0).sum())  # of the image inside the padding
            masks = torch.zeros(len(objects), *mask.shape)
            for k, o in enumerate(objects):
                pixels = torch.from_numpy(data.coco.annToMask(o))[None, None].float()
                masks[k, :height, :width] = interpolate(pixels, (height, width))[0, 0]
            batch["mask_labels"].append(masks)
            batch["class_labels"].append(torch.tensor([labels[o["category_id"]] for o in objects], dtype=torch.int64))
        return dict(batch)

    settings = TrainingArguments(
        args.out, num_train_epochs=args.epochs, per_device_train_batch_size=4, learning_rate=1e-4, max_grad_norm=1.0,
        bf16=torch.cuda.is_available(), remove_unused_columns=False, logging_steps=1, save_strategy="no", report_to=[],
    )  # fmt: skip
    trainer = Trainer(model, settings, train_dataset=data, data_collator=collate, processing_class=processor)
    trainer.train()
    trainer.save_model()  # loads in plain transformers


if __name__ == "__main__":
    main()
