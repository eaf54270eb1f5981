"""Exercise 11: `DataParallelBucket.norms_of_stages`, the gradient norm of every pipeline rank.

    python docs/lessons/exercises/11_norms.py

On 4 real processes (tp 2 × pp 2) with tied embeddings, against the gradients of plain PyTorch.
"""

import torch
from exercise import expect, run_on_ranks

import layouts
import process_group_manager as pgm
from data_parallel import DataParallelBucket
from model import build_on_meta, materialize
from pipeline_parallel import PipelineParallel, train_step_pipeline
from tensor_parallel import apply_tensor_parallel

CONFIG = layouts.tiny_config(tie_word_embeddings=True)


def norms():
    """(norm of every stage, the norm of all) after one step's backward."""
    manager, cpu = pgm.setup_process_group_manager(tp_size=2, pp_size=2, dp_size=1), torch.device("cpu")
    model = PipelineParallel(apply_tensor_parallel(build_on_meta(CONFIG, torch.float64)))
    materialize(model, CONFIG, seed=1, device=cpu)
    data_parallel = DataParallelBucket(model)
    data_loader = layouts.RandomMicroBatches(CONFIG.vocab_size, 4, manager.dp_rank)
    shapes = (layouts.MICRO_BATCH_SIZE, layouts.SEQ_LENGTH, CONFIG.hidden_size)
    data_parallel.zero_grad()
    train_step_pipeline(model, data_loader, shapes, cpu, torch.float64)
    data_parallel.finish_grad_sync()
    return torch.as_tensor(data_parallel.norms_of_stages()).tolist(), data_parallel.clip_gradients(None).item()


if __name__ == "__main__":
    expect(hasattr(DataParallelBucket, "norms_of_stages"), "DataParallelBucket has no method norms_of_stages")
    plain = layouts.train_plainly(CONFIG)["gradients"]
    squares = [0.0, 0.0]
    for name, gradient in plain.items():  # layers 0 and 1 and the embedding are stage 0's
        squares[name.startswith(("decoder_layers.2", "decoder_layers.3", "final"))] += gradient.square().sum().item()
    wanted = [square**0.5 for square in squares]
    for rank, (of_stages, norm) in enumerate(run_on_ranks(4, norms)):
        right = len(of_stages) == 2 and all(abs(a - b) < 1e-12 * b for a, b in zip(of_stages, wanted, strict=True))
        expect(right, f"rank {rank} has {of_stages}; in one process the stages' norms are {wanted}")
        together = sum(value**2 for value in of_stages) ** 0.5
        expect(abs(together - norm) < 1e-12 * norm, f"rank {rank}: {of_stages} are together {together}, not {norm}")
    print(f"right: {wanted[0]:.4f} and {wanted[1]:.4f}, on all 4 ranks")
