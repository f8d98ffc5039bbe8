"""The modules that are mutated, and the tests that must notice."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

SOURCES = Path("src/bottega")


@dataclass(frozen=True)
class Target:
    """Globs of modules below `SOURCES` and of test files below `tests`, without suffix."""

    modules: str
    tests: str


TARGETS = (
    Target("naming", "gateway/test_user_pipeline cli/test_names"),
    # Money.
    Target(
        "gateway/accounting/*",
        "gateway/test_ledger gateway/test_ledger_writer"
        " gateway/test_limiter gateway/test_accounts gateway/test_budgets"
        " gateway/test_access gateway/test_estimates gateway/test_rollups gateway/test_savings"
        " gateway/test_sequential gateway/test_feedback gateway/test_experiments"
        " gateway/test_web_pages gateway/test_overrides cli/test_savings",
    ),
    Target(
        "gateway/request/finalization gateway/request/shadow_calls gateway/request/bill",
        "gateway/test_completion gateway/test_budgets gateway/test_disconnects gateway/test_serving"
        " gateway/test_pinned_answers gateway/test_isolation gateway/test_billing"
        " gateway/test_stored_repeats gateway/test_shadow gateway/test_user_pipeline"
        " gateway/test_judging gateway/test_reported_agreement gateway/test_estimates",
    ),
    Target(
        "evaluation/runs/run_store evaluation/outcomes evaluation/runs/runner",
        "evaluation/test_committer evaluation/test_run_store evaluation/test_budget"
        " evaluation/test_runner evaluation/test_demonstration_recorder"
        " evaluation/test_training_data",
    ),
    # Utilities.
    Target(
        "_util/caching _util/event_loops",
        "_util/test_caching _util/test_event_loops gateway/test_repeats"
        " retrieval/test_wrappers generation/test_offline reranking/test_search_budget"
        " knowledge/test_filters",
    ),
    Target(
        "_util/batch_writer",
        "_util/test_batch_writer _util/test_outage evaluation/test_committer"
        " recording/test_cache_recorder gateway/test_ledger_writer gateway/test_logs"
        " gateway/test_ledger gateway/test_accounts",
    ),
    Target(
        "_util/sqlite _util/sql_tables _util/store_kind",
        "gateway/test_ledger gateway/test_accounts knowledge/test_rows _util/test_store_kind"
        " evaluation/test_committer",
    ),
    # Statistics.
    Target(
        "evaluation/metrics/* evaluation/runs/paired",
        "evaluation/test_metrics evaluation/test_paired evaluation/metrics/test_*",
    ),
    # Knowledge base.
    Target(
        "knowledge/sqlite/rows knowledge/sqlite/writes knowledge/records knowledge/batch",
        "knowledge/test_rows knowledge/test_base knowledge/test_replace knowledge/test_add"
        " knowledge/test_annotate knowledge/test_eviction knowledge/test_listing"
        " knowledge/test_verification knowledge/test_model knowledge/test_choices"
        " knowledge/test_pruning",
    ),
    Target(
        "knowledge/search knowledge/sqlite/search knowledge/index/vector_index",
        "knowledge/test_search_errors knowledge/test_index knowledge/test_index_updates"
        " knowledge/test_views knowledge/test_pruning knowledge/test_annotate"
        " knowledge/test_index_files knowledge/test_hnsw knowledge/test_filters"
        " knowledge/test_model",
    ),
    Target(
        "knowledge/eviction",
        "knowledge/test_eviction knowledge/test_base knowledge/test_pruning",
    ),
    Target(
        "knowledge/filters knowledge/sqlite/filters",
        "knowledge/test_filters knowledge/test_listing knowledge/test_stored_texts",
    ),
    Target("knowledge/transfer", "knowledge/test_export_import"),
    # Routing, parsing and selection of demonstrations.
    Target("routing/*", "routing/test_*"),
    Target("parsing/*", "parsing/test_*"),
    Target("reranking/*", "reranking/test_*"),
    Target("retrieval/*", "retrieval/test_*"),
    Target("pipeline", "test_pipeline test_recipe_rcts test_shadowing"),
    # Limits and repeats of gateway requests.
    Target(
        "gateway/request/reading openai_api/request",
        "gateway/test_limits gateway/test_requests gateway/test_hostile_requests"
        " gateway/test_overrides gateway/test_error_messages gateway/test_passed_urls"
        " gateway/test_decoding gateway/test_field_policy",
    ),
    Target(
        "gateway/request/image_fetcher",
        "gateway/test_addresses gateway/test_fetching gateway/test_internal_addresses"
        " gateway/test_passed_urls",
    ),
    Target(
        "gateway/state/response_cache",
        "gateway/test_repeat* gateway/test_stored_repeats",
    ),
    Target("openai_api/*", "openai_api/test_* gateway/test_http* generation/test_openai*"),
    # Gateway.
    Target("gateway/apis/batches/*", "gateway/test_batch*"),
    Target("gateway/state/*", "gateway/test_shared_*"),
    Target("gateway/apis/messages*", "gateway/test_messages"),
    Target(
        "gateway/apis/responses* gateway/request/response_store gateway/apis/translation"
        " gateway/apis/text_completions",
        "gateway/test_responses* gateway/test_stored_responses gateway/test_completions"
        " gateway/test_messages",
    ),
    Target("gateway/apis/embeddings", "gateway/test_embeddings gateway/test_batches"),
    Target(
        "gateway/apis/admin gateway/request/cached_examples gateway/apis/feedback"
        " gateway/request/request_traces",
        "gateway/test_admin gateway/test_feedback gateway/test_request_traces",
    ),
    Target(
        "gateway/telemetry/*",
        "gateway/test_metrics gateway/test_worker_metrics gateway/test_logs"
        " gateway/test_monitoring gateway/test_request_traces gateway/test_failure_reasons",
    ),
    Target(
        "gateway/config/* gateway/running/*",
        "gateway/test_config gateway/test_build gateway/test_admission gateway/test_connection"
        " gateway/test_listening gateway/test_namespaces gateway/test_readiness"
        " gateway/test_reload gateway/test_retrieval_methods gateway/test_shared_examples"
        " gateway/test_tuned_settings gateway/test_variants gateway/test_worker_metrics"
        " gateway/test_experiments gateway/test_overrides"
        " gateway/test_user_pipeline gateway/test_access cli/test_serve_check cli/test_workers",
    ),
    Target(
        "gateway/*",
        "gateway/test_completion gateway/test_serving gateway/test_requests gateway/test_isolation"
        " gateway/test_fallback gateway/test_faulty_upstream gateway/test_http_upstream"
        " gateway/test_http_streams gateway/test_lenient_upstreams gateway/test_local_upstream"
        " gateway/test_error_messages gateway/test_field_policy gateway/test_passages"
        " gateway/test_reasoning gateway/test_search gateway/test_access gateway/test_user_pipeline"
        " gateway/test_retrieval_methods gateway/test_shared_gateways gateway/test_admission"
        " gateway/test_limits gateway/test_keep_alive gateway/test_compared_parts",
    ),
    Target(
        "ui/standalone", "cli/test_ui ui/test_page_guards ui/test_hostile_requests ui/test_cache"
    ),
    Target("ui/*", "ui/test_*"),
    # Other stores and streams.
    Target(
        "knowledge/base_copy knowledge/copy_store knowledge/sqlite/copy knowledge/postgres/copy",
        "knowledge/test_base_copy",
    ),
    Target("knowledge/postgres/*", "knowledge/test_postgres_* knowledge/test_store_model"),
    Target("evaluation/streams/*", "evaluation/test_stream* cli/test_stream"),
    Target(
        "compression/passage_store compression/persistence",
        "compression/test_store compression/test_persistence compression/test_prefix_searcher",
    ),
    # RACC.
    Target(
        "compression/layers compression/model compression/prefixes compression/hyper_model",
        "compression/test_aggregator compression/test_modulation"
        " compression/test_racc compression/test_packed_texts compression/test_hyper_models*"
        " compression/test_passage_compressor"
        " compression/test_one_token compression/test_kv_reuse",
    ),
)


def target_of(path: str) -> Target:
    """Return the first target that lists the module, `path` being relative to the repository."""
    relative = Path(path).relative_to(SOURCES).as_posix()
    for target in TARGETS:
        if any(fnmatch(relative, pattern) for pattern in _files(target.modules)):
            return target
    raise LookupError(f"{path} has no target, add one to {__name__}")


def modules(root: Path) -> list[str]:
    """Return the paths of all mutated modules, sorted."""
    found = {
        path.relative_to(root).as_posix()
        for target in TARGETS
        for pattern in _files(target.modules)
        for path in (root / SOURCES).glob(pattern)
        if path.name != "__init__.py"
    }
    return sorted(found)


def files_for(root: Path, path: str) -> list[str]:
    """Return the module's test files in the order in which they run, its namesake first."""
    found = [
        file.relative_to(root).as_posix()
        for pattern in _files(target_of(path).tests)
        for file in sorted((root / "tests").glob(pattern))
    ]
    namesake = f"test_{Path(path).name}"
    return sorted(dict.fromkeys(found), key=lambda file: Path(file).name != namesake)


def _files(patterns: str) -> list[str]:
    return [f"{pattern}.py" for pattern in patterns.split()]
