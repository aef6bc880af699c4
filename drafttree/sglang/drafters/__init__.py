"""SGLang workers, one for each kind of drafter."""
