"""What can be set: six sections of keys with their defaults, their types and what they mean.

A new key is a line in its section, and one in `requirements` (read_config.py) for what it has to fit.
"""

import os
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    WrapValidator,
    model_validator,
)
from pydantic.types import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic_core import PydanticCustomError

Text = Annotated[str, Field(min_length=1)]
Place = Annotated[Text, AfterValidator(os.path.expanduser)]  # ~ is the home folder, as in a shell
Beta = Annotated[float, Field(ge=0, lt=1)]
Size = Annotated[int, Field(gt=0, lt=2**31)]  # of something that is allocated, or counted one by one


def told_as(right: str) -> WrapValidator:
    """Says of any wrong value just what is right: of a union, pydantic would tell what is wrong with each form."""

    def check(value, validate):
        try:
            return validate(value)
        except ValidationError:
            raise PydanticCustomError("wrong_form", f"must be {right}") from None

    return WrapValidator(check)


LayerCounts = Annotated[
    Literal["balanced"] | list[NonNegativeInt], told_as("'balanced' or a list of layer counts, each at least 0")
]
Recompute = Annotated[Literal["none", "layer"] | PositiveInt, told_as("'none', 'layer' or an integer greater than 0")]


class Section(BaseModel):
    # strict: "2" is not 2 and true is not 1, but 1 is a float
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class DistributedConfig(Section):
    tp_size: Size = 1  # ranks that share every layer's matrices
    pp_size: Size = 1  # stages that the layers are cut into
    dp_size: Size | None = 1  # replicas, each with its own part of the batch; null = all the processes left over
    pp_engine: Text = "1f1b"  # the pipeline schedule: a name from schedules.py, or path/to/file.py:function
    pp_chunks: Size | None = None  # stages on each rank; null = what the schedule needs: 1, or 2
    pp_layers: LayerCounts | None = None  # layers of each stage; "balanced" = by cost; null = as even as possible
    zero1: bool = False  # shard the optimizer's state over dp
    sequence_parallel: bool = False  # shard norms and the residual stream along the sequence over tp
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto = cuda where there is one
    timeout_seconds: Annotated[float, Field(ge=1, le=1e7)] = 600.0  # how long a collective waits for a missing rank


class Rope(Section):
    """Rotary embeddings: every pair of a head's numbers turns by position / wavelength, short to long wavelengths."""

    rope_type: Literal["default", "linear", "llama3"] = "default"
    rope_theta: PositiveFloat = 10000.0  # the longest wavelength is about 2 pi rope_theta positions
    factor: PositiveFloat | None = None  # linear: all frequencies are divided by it; llama3: the low ones
    low_freq_factor: PositiveFloat | None = None  # low: wavelength > original_max_position_embeddings / low_freq_factor
    high_freq_factor: PositiveFloat | None = None  # not divided: < original_max_position_embeddings / high_freq_factor
    original_max_position_embeddings: PositiveInt | None = None  # before the model was stretched


# Checked as a class, kept as the plain dict {"rope_type": ..., "rope_theta": ..., ...} of transformers 5.
RopeDict = Annotated[Rope, AfterValidator(lambda rope: rope.model_dump(exclude_none=True)), PlainSerializer(dict)]


class ModelConfig(Section):
    """Names and defaults are LlamaConfig's, so a config.json that leaves a field out means the same model here."""

    name: Place | None = None  # hub name, or folder with a config.json: the architecture that the keys below change
    hidden_size: Size = 4096  # width of the residual stream
    num_hidden_layers: Size = 32  # decoder layers
    num_attention_heads: Size = 32  # query heads
    num_key_value_heads: Size | None = None  # null = num_attention_heads
    head_dim: Size | None = None  # width of a head; null = hidden_size / num_attention_heads
    intermediate_size: Size = 11008  # width of the MLP
    vocab_size: Size = 32000  # rows of the embedding; every token id of the data is below it
    max_position_embeddings: Size = 2048  # longest sequence, in tokens
    rms_norm_eps: PositiveFloat = 1e-6  # added to the mean square before its root
    rope_parameters: RopeDict = Rope().model_dump(exclude_none=True)  # or rope_theta and rope_scaling, the old form
    tie_word_embeddings: bool = False  # one matrix for embedding and output
    attention_bias: bool = False  # biases in the q, k, v and o projections
    initializer_range: NonNegativeFloat = 0.02  # standard deviation of the initial weights
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"  # of weights and arithmetic
    recompute: Recompute = "none"  # forward again in backward: every layer, or every k-th

    @model_validator(mode="after")
    def derive(self):
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        # where this does not divide, head_dim stays null and `requirements` says so
        if self.head_dim is None and self.hidden_size % self.num_attention_heads == 0:
            self.head_dim = self.hidden_size // self.num_attention_heads
        return self


class TrainingConfig(Section):
    seed: NonNegativeInt = 42  # of the initial weights and the order of the data
    steps: PositiveInt = 1000  # optimizer steps; also the end of the cosine
    max_tokens: PositiveInt | None = None  # stop after so many tokens, if that comes before `steps`
    seq_length: Size = 1024  # tokens of a sequence
    micro_batch_size: Size = 1  # sequences of one forward pass
    gradient_accumulation_steps: Size = 1  # micro-batches of a step, on each dp rank
    learning_rate: NonNegativeFloat = 3e-4  # the highest, at the end of the warm-up
    min_learning_rate: NonNegativeFloat = 0.0  # where the cosine ends
    warmup_steps: NonNegativeInt = 0  # steps of linear rise to learning_rate
    weight_decay: NonNegativeFloat = 0.1  # AdamW, of matrices; norm weights and biases have none
    adam_beta1: Beta = 0.9  # decay of the first moment
    adam_beta2: Beta = 0.95  # decay of the second moment
    adam_eps: PositiveFloat = 1e-8  # added to the root of the second moment
    grad_clip: PositiveFloat | None = 1.0  # largest global gradient norm; null = no clipping
    eval_frequency: NonNegativeInt = 0  # steps from one evaluation to the next; 0 = none
    max_bad_steps: PositiveInt = 3  # steps in a row whose loss or gradient norm is not finite, before the run ends
    eval_steps: PositiveInt = 10  # global batches of an evaluation, fewer where the validation data has fewer


class DatasetConfig(Section):
    name: Text | None = "python-stdlib"  # the standard library's source, or a data set of the hub; null with `files`
    files: Annotated[list[Place], Field(min_length=1)] | None = None  # local .txt, .jsonl, .parquet instead of `name`
    subset_name: Text | None = None  # configuration of a hub data set
    split: Text = "train"  # of a hub data set
    validation_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0  # the last part of the tokens, kept for evaluation
    validation_files: Annotated[list[Place], Field(min_length=1)] | None = None  # or local files of their own
    text_column: Text = "text"  # what to read of a row
    tokenizer: Place = "bytes"  # a token a byte and 256 for end of text; or a hub name or folder
    shuffle: bool = True  # another order in each epoch, by seed; false = the order of the text
    num_proc: PositiveInt = 1  # threads of the tokenizers library (bytes needs none)
    cache_dir: Place = "cache"  # folder of the tokenised data

    @model_validator(mode="after")
    def files_replace_the_default_name(self):
        if self.files and "name" not in self.model_fields_set:
            self.name = None
        return self


class LoggingConfig(Section):
    log_frequency: PositiveInt = 1  # steps from one printed line to the next
    use_wandb: bool = False  # log to Weights & Biases, from rank 0
    project_name: Text = "pipeline-pretraining"  # wandb's project
    run_name: Text | None = None  # wandb's name of the run; null = wandb makes one up
    metrics_file: Place | None = None  # JSONL, one object a step; null = none
    show_transfers: bool = False  # print what stages send each other and wait for, as it happens
    trace_file: Place | None = None  # Chrome trace of one step on all ranks; null = none
    trace_step: PositiveInt = 2  # which step is traced, counted from this run's start; the first one warms up


class CheckpointConfig(Section):
    save_dir: Place | None = None  # folder of the checkpoints; null = none
    save_frequency: NonNegativeInt = 0  # steps from one checkpoint to the next; 0 = only at the end
    keep: PositiveInt | None = None  # the newest so many are kept; null = all
    resume: Place = "auto"  # auto = the newest whole one in save_dir; none; or the path of one
    init_from: Place | None = None  # weights to start from: a Hugging Face Llama, hub name or folder


class Config(Section):
    distributed: DistributedConfig = Field(default_factory=DistributedConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    dataset: DatasetConfig = Field(default_factory=DatasetConfig)
    logging: LoggingConfig = Field(default_factory=LoggingConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)

    @property
    def global_batch_size(self) -> int:
        """Sequences of a step, over all ranks; a dp_size of null is settled by `check_world_size`."""
        t = self.training
        return t.micro_batch_size * t.gradient_accumulation_steps * self.distributed.dp_size

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.training.seq_length


VALID_KEYS = [f"{name}.{key}" for name, field in Config.model_fields.items() for key in field.annotation.model_fields]
VALID_KEYS += ["model.rope_theta", "model.rope_scaling"]  # the form of transformers 4: architecture.py
