import java.nio.ByteBuffer;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Base64;
import java.util.List;
import org.apache.kafka.common.record.MemoryRecords;
import org.apache.kafka.common.record.Record;
import org.apache.kafka.common.record.RecordBatch;
import org.apache.kafka.common.utils.BufferSupplier;
import org.apache.kafka.common.utils.CloseableIterator;

/**
 * Reads record batches as a consumer does. Arguments: files, each with one batch. A line of JSON for each: the values of
 * its records in base64, or a string, why it cannot be read.
 */
class Reads {
    public static void main(String[] paths) throws Exception {
        for (String path : paths) {
            List<String> values = new ArrayList<>();
            try {
                ByteBuffer data = ByteBuffer.wrap(Files.readAllBytes(Path.of(path)));
                for (RecordBatch batch : MemoryRecords.readableRecords(data).batches()) {
                    try (CloseableIterator<Record> records = batch.streamingIterator(BufferSupplier.create())) {
                        while (records.hasNext()) {
                            ByteBuffer value = records.next().value();
                            byte[] bytes = new byte[value.remaining()];
                            value.get(bytes);
                            values.add('"' + Base64.getEncoder().encodeToString(bytes) + '"');
                        }
                    }
                }
                System.out.println(values);
            } catch (Exception | LinkageError unread) {
                System.out.println('"' + unread.toString().replaceAll("[^ -~]|[\\\\\"]", "'") + '"');
            }
        }
    }
}
