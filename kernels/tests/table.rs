//! The row table in shared memory: a reader gets complete tables of the step it asks for.

use kernels::table::{Error, Export, PoolFacts, TableReader, TableRow, TableWriter};
use std::{fs, thread};
use tempfile::TempDir;

fn facts(export: Option<Export>) -> PoolFacts {
    PoolFacts { page_tokens: 16, pages: 4097, r2t_rows: 33, r2t_stride: 1 << 17, export }
}

fn row(epoch: u64, i: u32) -> TableRow {
    let version = epoch.wrapping_mul(0x9E37_79B9) ^ u64::from(i);
    TableRow { row: i, len: i * 3, session: i / 2, version, key: !version }
}

fn rows(epoch: u64) -> Vec<TableRow> {
    (0..u32::try_from(epoch % 40).expect("small")).map(|i| row(epoch, i)).collect()
}

#[test]
fn what_the_engine_says_is_read() {
    let folder = TempDir::new().expect("there is room for temporary files");
    let path = folder.path().join("rows");
    let export = Export {
        handle: std::array::from_fn(|i| u8::try_from(i * 3).expect("small")),
        offset: 1 << 40,
        bytes: 12345,
        uuid: std::array::from_fn(|i| 255 - u8::try_from(i).expect("small")),
    };
    for facts in [facts(None), facts(Some(export))] {
        let mut writer = TableWriter::create(&path, &facts, 4, 40).expect("the folder is ours");
        let reader = TableReader::open(&path).expect("it was made a moment ago");
        assert_eq!(reader.facts(), &facts);
        assert_eq!((reader.begun_epoch(), reader.done_epoch(), reader.newest_epoch()), (0, 0, 0));
        for epoch in 1..20 {
            let step = writer.begin_step();
            writer.set_begun(step);
            assert_eq!((reader.begun_epoch(), reader.newest_epoch()), (epoch, epoch - 1));
            writer.publish(step, &rows(epoch)).expect("there is room");
            writer.set_done(step);
            assert_eq!((reader.done_epoch(), reader.newest_epoch()), (epoch, epoch));
            let there: Vec<u64> = (0..30).filter(|&e| reader.table(e).is_some()).collect();
            let want: Vec<u64> = (epoch.saturating_sub(3).max(1)..=epoch).collect();
            assert_eq!(there, want, "the ring keeps the last four");
            assert_eq!(reader.table(epoch), Some(rows(epoch)));
        }
        let step = writer.begin_step();
        let error = writer.publish(step, &[TableRow::default(); 41]);
        assert!(matches!(error, Err(Error::TooManyRows { rows: 41, rows_max: 40 })));
        drop(writer);
        assert!(matches!(reader.check(), Err(Error::Closed)));
        assert!(matches!(TableReader::open(&path), Err(Error::File(..))), "it is gone");
    }
}

#[test]
fn files_that_are_no_table_are_refused() {
    let folder = TempDir::new().expect("there is room for temporary files");
    let path = folder.path().join("rows");
    for shape in [(1, 10), (65, 10), (4, 0), (4, 1 << 17)] {
        let made = TableWriter::create(&path, &facts(None), shape.0, shape.1);
        assert!(matches!(made, Err(Error::RingSize { .. })), "{shape:?}");
    }
    let writer = TableWriter::create(&path, &facts(None), 4, 100).expect("the folder is ours");
    let whole = fs::read(&path).expect("it is there");
    let other = folder.path().join("other");
    let mut damaged = vec![vec![], vec![0; 64], whole[..4095].to_vec(), vec![0; whole.len()]];
    // Damaged files: truncated, wrong magic, wrong version, a ring that is too large.
    damaged.push(whole[..whole.len() - 1].to_vec());
    for byte in [0, 8, 13, 18] {
        let mut bytes = whole.clone();
        bytes[byte] ^= 0x41;
        damaged.push(bytes);
    }
    for (case, bytes) in damaged.iter().enumerate() {
        fs::write(&other, bytes).expect("the folder is ours");
        let error = TableReader::open(&other).expect_err("it is no table");
        assert!(matches!(error, Error::UnknownFormat | Error::File(..)), "case {case}: {error}");
    }
    drop(writer);
}

#[test]
fn no_table_is_half_old_and_half_new() {
    let folder = TempDir::new().expect("there is room for temporary files");
    let path = folder.path().join("rows");
    let mut writer = TableWriter::create(&path, &facts(None), 2, 40).expect("the folder is ours");
    let reader = TableReader::open(&path).expect("it was made a moment ago");
    thread::scope(|scope| {
        let read = scope.spawn(move || {
            let (mut seen, mut last) = (0, 0);
            // Reads until the writer is gone.
            while reader.check().is_ok() || seen == 0 {
                let epoch = reader.newest_epoch();
                assert!(epoch >= last, "time goes on");
                last = epoch;
                if let Some(table) = reader.table(epoch) {
                    assert_eq!(table, rows(epoch), "epoch {epoch}");
                    seen += 1;
                }
            }
            seen
        });
        for epoch in 1..100_000 {
            let step = writer.begin_step();
            writer.publish(step, &rows(epoch)).expect("there is room");
        }
        // The last table stays in the mapping, so the reader sees at least one.
        drop(writer);
        assert!(read.join().expect("no table was torn") > 0);
    });
}
