//! The compiled core of kproxy: it relays what needs no decision, and reads captures.
//!
//! A `Reader` reads the exchanges of captured connections (`kproxy/capture/columns/`). A `Lane` serves all connections of one event loop. It decides nothing: it asks Python about each kind of request once,
//! and a frame that is not plain ends the turn of its connection, whose state goes to the Python session
//! (`kproxy/proxy/relay/compiled.py`).

mod bodies;
mod capture;
mod conn;
mod program;
mod rope;
mod sockets;
mod tally;
mod turn;

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

/// Grows with each change that kproxy must know (`INTERFACE` of kproxy/core.py).
const INTERFACE: u32 = 3;

#[pymodule]
fn kproxy_core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("INTERFACE", INTERFACE)?;
    module.add_class::<capture::Reader>()?;
    module.add_class::<tally::Lane>()?;
    module.add_class::<tally::Program>()?;
    module.add_class::<tally::Tally>()?;
    module.add_class::<conn::Conn>()?;
    module.add_class::<conn::Side>()?;
    module.add_function(wrap_pyfunction!(is_plain, module)?)?;
    module.add_function(wrap_pyfunction!(fits, module)?)?;
    module.add_function(wrap_pyfunction!(collected, module)?)?;
    module.add_function(wrap_pyfunction!(capture::read_bodies, module)?)?;
    Ok(())
}

/// Returns whether a response, from the byte after its correlation id on, is plain.
#[pyfunction]
fn is_plain(program: Vec<u32>, response: &[u8]) -> PyResult<bool> {
    tally::checked(&program)?;
    Ok(program::is_plain(&program, response))
}

/// Returns whether a response of the size of a plain one differs from it in bytes alone on which nothing depends.
#[pyfunction]
fn fits(program: Vec<u32>, plain: &[u8], response: &[u8]) -> PyResult<bool> {
    tally::checked(&program)?;
    Ok(program::shape_of(&program, plain).map_or(false, |shape| shape.fits(response)))
}

/// Returns what a program collects from a frame, from the byte after its correlation id on; None: it does not fit.
///
/// The names as bytes; partitions as (topic, index, bytes, batches, records, codecs, offset).
#[pyfunction]
fn collected(py: Python<'_>, program: Vec<u32>, frame: &[u8]) -> PyResult<Option<(Py<PyBytes>, Py<PyList>)>> {
    tally::checked(&program)?;
    let mut found = program::Found::default();
    if !program::collects(&program, frame, &mut found) {
        return Ok(None);
    }
    let partitions = conn::as_tuples(py, &found)?.unbind();
    Ok(Some((PyBytes::new_bound(py, &found.names).unbind(), partitions)))
}
