"""The functions by which a run of joined ranks saves and resumes."""


def save_checkpoint(checkpoint_dir, step, model_data, optimizer_data, meta_data, rank=0):
    raise NotImplementedError


def load_checkpoint(checkpoint_dir, step, device, load_optimizer=False, rank=0):
    raise NotImplementedError
