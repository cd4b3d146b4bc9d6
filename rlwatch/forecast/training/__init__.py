"""Making a forecasting model from labelled runs. Needs the extra ``forecast`` (scikit-learn, pyarrow, joblib)."""
