package kproxy.tools;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.lang.reflect.InvocationTargetException;
import java.nio.ByteBuffer;
import java.util.Collection;
import java.util.Iterator;
import org.apache.kafka.common.protocol.ByteBufferAccessor;
import org.apache.kafka.common.protocol.Message;
import org.apache.kafka.common.protocol.ObjectSerializationCache;
import org.apache.kafka.common.record.internal.MemoryRecords;

/** What the official library does with a message: bytes and JSON, there and back. Everything else here trusts only this. */
final class Official {
    static final ObjectMapper JSON = new ObjectMapper();

    private Official() { }

    static byte[] write(Message message, short version) {
        var cache = new ObjectSerializationCache();
        var buffer = ByteBuffer.allocate(message.size(cache, version));
        message.write(new ByteBufferAccessor(buffer), cache, version);
        require(!buffer.hasRemaining(), "size() said more than write() wrote");
        return buffer.array();
    }

    /** Reads a message from the rest of the buffer, all of it. */
    static Message read(Class<?> type, ByteBuffer buffer, short version) throws ReflectiveOperationException {
        var message = (Message) type.getConstructor().newInstance();
        message.read(new ByteBufferAccessor(buffer), version);
        return message;
    }

    /** The library's own JSON, save that records, of which it gives only the size, are their bytes. */
    static JsonNode json(Layout layout, Message message, short version) throws ReflectiveOperationException {
        var node = (JsonNode) converter(layout.type).getMethod("write", layout.type, short.class).invoke(null, message, version);
        putRecords(layout, message, node);
        return node;
    }

    static Message fromJson(Class<?> type, JsonNode node, short version) throws ReflectiveOperationException {
        return (Message) converter(type).getMethod("read", JsonNode.class, short.class).invoke(null, node, version);
    }

    private static Class<?> converter(Class<?> type) throws ClassNotFoundException {
        return Class.forName(type.getName() + "JsonConverter");
    }

    private static void putRecords(Layout layout, Object holder, JsonNode node) throws ReflectiveOperationException {
        for (Layout.Member member : layout.members()) {
            Object value = member.access.get(holder);
            if (member.type.equals("records")) {
                String size = member.name + "SizeInBytes";
                if (value == null) {
                    ((ObjectNode) node).putNull(member.name).remove(size);
                } else {
                    byte[] bytes = Batches.bytes((MemoryRecords) value);
                    ((ObjectNode) node).put(member.name, bytes).put(size, bytes.length);
                }
            } else if (member.struct != null && value != null && node.hasNonNull(member.name)) {
                JsonNode inner = node.get(member.name);
                if (member.array) {
                    Iterator<JsonNode> nodes = inner.iterator();
                    for (Object element : (Collection<?>) value) putRecords(member.struct, element, nodes.next());
                } else {
                    putRecords(member.struct, value, inner);
                }
            }
        }
    }

    static Message newInstance(Class<?> type) throws ReflectiveOperationException {
        return (Message) type.getConstructor().newInstance();
    }

    /** The class of an API's messages; null where this release names the API and has no class for it. */
    static Class<?> classOf(java.util.function.Supplier<? extends Message> factory) {
        try {
            return factory.get().getClass();
        } catch (org.apache.kafka.common.errors.UnsupportedVersionException e) {
            return null;
        }
    }

    static short lowest(Class<?> type) throws ReflectiveOperationException {
        return type.getField("LOWEST_SUPPORTED_VERSION").getShort(null);
    }

    static short highest(Class<?> type) throws ReflectiveOperationException {
        return type.getField("HIGHEST_SUPPORTED_VERSION").getShort(null);
    }

    static void require(boolean condition, String otherwise) {
        if (!condition) throw new IllegalStateException(otherwise);
    }

    static RuntimeException rethrown(InvocationTargetException e) {
        return e.getCause() instanceof RuntimeException cause ? cause : new IllegalStateException(e.getCause());
    }
}
